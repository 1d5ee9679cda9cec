// A tree of hypotheses grows step by step, with a table of the present candidates. `make`: see shell.js.
const build = (root, views) => {
  const now = {view: 0, frame: 0};
  const draw = (tag, attributes = {}, ...children) => {
    const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
    for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
    made.append(...children);
    return made;
  };
  const tree = make("div", {class: "tree", tabindex: 0, role: "group", "aria-label": "Tree of hypotheses"});
  const said = make("p", {role: "status"}), body = make("tbody");
  const slider = make("input", {type: "range", min: 0, "aria-label": "Half-step"});
  slider.addEventListener("input", () => go(Number(slider.value)));
  const button = (text, by) => {
    const made = make("button", {type: "button"}, text);
    made.addEventListener("click", () => go(now.frame + by));
    return made;
  };
  const back = button("\u25c0 Back", -1), forward = button("Forward \u25b6", 1);
  let groups;
  const phrase = (nodes, i) => i ? `${phrase(nodes, nodes[i - 1][1])} ${nodes[i - 1][0]}`.trim() : "";
  const rebuild = () => {
    const {nodes, root: middle, leaves, steps} = views[now.view][1], row = 38;
    const columns = [30];
    for (let depth = 1; depth <= steps; depth++) {
      const longest = Math.max(...nodes.filter(node => node[2] === depth).map(node => Math.max(node[0].length, 5)));
      columns.push(columns.at(-1) + 9 * longest + 40);
    }
    const start = depth => depth ? columns[depth - 1] + 26 : 8, y = at => row * at + 20;
    const svg = draw("svg", {width: columns.at(-1), height: row * leaves + 8, "aria-hidden": "true"}, draw("circle", {cx: 8, cy: y(middle), r: 5}));
    groups = nodes.map(([word, parent, depth, at, score]) => {
      const from = parent ? nodes[parent - 1] : ["", 0, 0, middle], x = start(depth);
      const left = parent ? Math.min(x - 30, start(depth - 1) + 14 + 9 * from[0].length) : 14;
      return draw("g", {}, draw("line", {x1: left, y1: y(from[3]), x2: x - 5, y2: y(at)}), draw("circle", {cx: x, cy: y(at), r: 5}),
        draw("text", {x: x + 9, y: y(at) + 2}, word), draw("text", {x: x + 9, y: y(at) + 15, class: "score"}, score.toFixed(2).replace("-", "\u2212")));
    });
    svg.append(...groups);
    tree.replaceChildren(svg);
    slider.max = 2 * steps;
    go(0);
  };
  const go = frame => {
    const {nodes, steps} = views[now.view][1], step = Math.ceil(frame / 2), chosen = frame % 2 === 0;
    if (frame < 0 || frame > 2 * steps) return;
    now.frame = frame;
    slider.value = frame;
    back.setAttribute("aria-disabled", frame === 0);
    forward.setAttribute("aria-disabled", frame === 2 * steps);
    groups.forEach((group, i) => {
      const [, , depth, , , fate] = nodes[i];
      group.toggleAttribute("hidden", frame < 2 * depth - 1);
      group.setAttribute("class", frame >= 2 * depth ? fate : "");
    });
    const present = nodes.map((node, i) => [...node, i]).filter(node => node[2] === step).sort((a, b) => b[4] - a[4]);
    body.replaceChildren(...present.map(([, , , , score, fate, i]) => make("tr", {},
      make("td", {}, phrase(nodes, i + 1)), make("td", {}, score.toFixed(2).replace("-", "\u2212")), make("td", {}, chosen ? fate : "?"))));
    const count = fate => present.filter(node => node[5] === fate).length;
    said.textContent = !frame ? `Start: the empty hypothesis. Steps to come: ${steps}.`
      : chosen ? `Step ${step} of ${steps}, choose: ${count("kept")} kept, ${count("dropped")} dropped, ${count("ended")} ended.`
      : `Step ${step} of ${steps}, grow: ${present.length} continuations.`;
    const done = nodes.map((node, i) => [...node, i]).filter(node => node[5] === "ended" && 2 * node[2] <= frame).sort((a, b) => b[4] - a[4]);
    if (done.length) said.textContent += ` Best that has ended: ${phrase(nodes, done[0][6] + 1)}.`;
    const shown = groups.filter((group, i) => nodes[i][2] === step), box = shown[0]?.getBBox();
    if (box) tree.scrollLeft = Math.max(0, box.x + box.width - tree.clientWidth);
  };
  const tools = make("div", {class: "tools"}, back, forward, slider);
  if (views.length > 1) tools.prepend(menu("Search", views.map(([name]) => name), 0, i => { now.view = i; rebuild(); }));
  root.append(tools, said, tree, make("table", {}, make("thead", {}, make("tr", {}, ...["hypothesis", "score", "fate"].map(name => make("th", {scope: "col"}, name)))), body));
  root.addEventListener("keydown", event => {
    const by = {ArrowRight: 1, ArrowLeft: -1}[event.key];
    if (!by || ["SELECT", "INPUT"].includes(event.target.tagName)) return;
    event.preventDefault();
    event.stopPropagation();
    go(now.frame + by);
  });
  rebuild();
};
