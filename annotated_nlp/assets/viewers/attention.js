// A head and a token are chosen; bars, or shades of a grid of patches, show where it looks. `make`, `menu`: see shell.js.
const build = (root, views) => {
  const now = {view: 0, layer: 0, head: 0, query: 0};
  const bytes = views.map(([, view]) => Uint8Array.from(atob(view.weights), c => c.charCodeAt(0)));
  for (const [, view] of views) {
    view.same = !view.keys;
    view.keys ??= view.queries;
  }
  const percent = weight => `${Math.round(100 * weight)}%`;
  const said = make("p", {role: "status"}), page = make("div");
  let queries, keys, tiles, menus;
  const weights = () => {
    const {heads, queries: {length: n}, keys: {length: m}} = views[now.view][1];
    const start = ((now.layer * heads + now.head) * n + now.query) * m;
    return Array.from(bytes[now.view].subarray(start, start + m), byte => (byte / 255) ** 2);
  };
  const tile = (layer, head) => {
    const {heads, queries: {length: n}, keys: {length: m}} = views[now.view][1];
    const canvas = make("canvas", {width: m, height: n, title: `layer ${layer + 1}, head ${head + 1}`});
    const context = canvas.getContext("2d"), pixels = context.createImageData(m, n);
    const start = (layer * heads + head) * n * m;
    for (let i = 0; i < n * m; i++) pixels.data.set([26, 128, 192, bytes[now.view][start + i]], 4 * i);
    context.putImageData(pixels, 0, 0);
    canvas.addEventListener("click", () => { Object.assign(now, {layer, head}); update(); });
    return canvas;
  };
  const well = () => make("span", {class: "well"}, make("span"), make("i"));
  const token = (text, bar, radio) => make(radio ? "button" : "span",
    radio ? {class: "token", role: "radio", type: "button"} : {class: "token", role: "listitem"},
    ...(bar ? [well()] : []), text.replaceAll("\u2581", "\u00b7"));
  const group = (label, radio, ...parts) => make("div", radio ? {role: "radiogroup", "aria-label": label} : {role: "list", "aria-label": label}, ...parts);
  const panel = (view, label, radio) => {
    const before = view.queries.length - view.patches;
    const extra = view.queries.slice(0, before).map(text => token(text, !radio, radio));
    const cells = view.queries.slice(before).map(text => radio
      ? make("button", {class: "cell", role: "radio", type: "button", "aria-label": text})
      : make("span", {class: "cell", role: "listitem", title: text}));
    const grid = make("div", {class: "grid", role: "presentation", style: `grid-template-columns: repeat(${view.columns}, 1fr);` + (radio ? `background-image: url(${view.image})` : "")}, ...cells);
    return [group(label, radio, make("div", {class: "strip", role: "presentation"}, ...extra), grid), [...extra, ...cells]];
  };
  const rebuild = () => {
    const view = views[now.view][1], again = Array.from({length: view.layers}, (_, layer) => Array.from({length: view.heads}, (_, head) => tile(layer, head)));
    now.layer = Math.min(now.layer, view.layers - 1);
    now.head = Math.min(now.head, view.heads - 1);
    now.query = Math.min(now.query, view.queries.length - 1);
    tiles = again;
    const numbers = count => Array.from({length: count}, (_, i) => i + 1);
    menus = {
      layer: menu("Layer", numbers(view.layers), now.layer, i => { now.layer = i; update(); }),
      head: menu("Head", numbers(view.heads), now.head, i => { now.head = i; update(); }),
    };
    const parts = [make("div", {class: "tools"}, ...(view.layers > 1 ? [menus.layer] : []), ...(view.heads > 1 ? [menus.head] : []))];
    if (view.layers * view.heads > 1) parts.push(make("div", {class: "heads", "aria-hidden": "true",
      style: `grid-template-columns: max-content repeat(${view.heads}, minmax(0, 4rem))`},
      ...tiles.flatMap((row, layer) => [make("span", {}, layer + 1), ...row])));
    let asking;
    if (view.image) {
      const [left, from] = panel(view, "Who looks", true), [right, to] = panel(view, "Where it looks", false);
      asking = left; queries = from; keys = to;
      parts.push(make("div", {class: "pair"}, make("div", {class: "panel"}, make("p", {}, "Who looks"), left), make("div", {class: "panel"}, make("p", {}, "Where it looks"), right)));
    } else {
      queries = view.queries.map(text => token(text, view.same, true));
      keys = view.same ? queries : view.keys.map(text => token(text, true, false));
      asking = group("Who looks", true, ...queries);
      asking.className = "strip";
      parts.push(make("p", {}, view.same ? "Choose a token: the bars show where it looks." : "Who looks"), asking);
      if (!view.same) {
        const looked = group("Where it looks", false, ...keys);
        looked.className = "strip";
        parts.push(make("p", {}, "Where it looks"), looked);
      }
    }
    queries.forEach((query, i) => query.addEventListener("click", () => { now.query = i; update(); }));
    asking.addEventListener("keydown", event => {
      const before = view.image ? view.queries.length - view.patches : 0;
      const down = view.image && now.query >= before ? view.columns : 1, last = queries.length - 1;
      const to = {ArrowRight: now.query + 1, ArrowLeft: now.query - 1, ArrowDown: now.query + down, ArrowUp: now.query - down, Home: 0, End: last}[event.key];
      if (to === undefined) return;
      event.preventDefault();
      event.stopPropagation();
      now.query = Math.max(0, Math.min(last, to));
      update();
      queries[now.query].focus();
    });
    page.replaceChildren(...parts);
    update();
  };
  const update = () => {
    const view = views[now.view][1], row = weights(), most = Math.max(...row, 1e-9);
    tiles.forEach((line, layer) => line.forEach((canvas, head) => canvas.classList.toggle("on", layer === now.layer && head === now.head)));
    for (const name of ["layer", "head"]) menus[name].querySelector("select").value = now[name];
    queries.forEach((query, i) => {
      query.setAttribute("aria-checked", i === now.query);
      query.tabIndex = i === now.query ? 0 : -1;
    });
    keys.forEach((key, i) => {
      const well = key.querySelector(".well");
      if (!well) {
        key.style.background = `rgb(26 128 192 / ${row[i] / most})`;
        key.title = `${view.keys[i]}: ${percent(row[i])}`;
        return;
      }
      well.firstChild.textContent = row[i] < 0.005 ? "" : percent(row[i]);
      well.lastChild.style.height = `${3 * row[i]}rem`;
    });
    const best = row.map((weight, i) => [weight, i]).sort((a, b) => b[0] - a[0]).slice(0, 3).filter(([weight]) => weight >= 0.005);
    const name = text => view.image ? text : `“${text.replaceAll("\u2581", "\u00b7")}”`;
    const where = [view.layers > 1 && `layer ${now.layer + 1}`, view.heads > 1 && `head ${now.head + 1}`].filter(Boolean).join(", ");
    said.textContent = `${where && `In ${where}, `}${name(view.queries[now.query])} looks at ${best.map(([weight, i]) => `${name(view.keys[i])} ${percent(weight)}`).join(", ") || "nothing"}.`;
  };
  if (views.length > 1) root.append(make("div", {class: "tools"}, menu("Example", views.map(([name]) => name), 0, i => { now.view = i; rebuild(); })));
  root.append(page, said);
  rebuild();
};
