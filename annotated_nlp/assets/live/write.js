// A language model continues a text. `views` holds one: model, opening, temperature, top_p, written, candidates.
const build = (root, [[, view]]) => {
  const text = make("textarea", {rows: 2}), written = make("span", {class: "new"}), before = make("span");
  text.value = view.opening;
  const slider = (name, attributes) => {
    const input = make("input", {type: "range", step: .05, ...attributes}), value = make("span", {"aria-hidden": "true"}, attributes.value);
    input.addEventListener("input", () => { value.textContent = input.value; candidates(); });
    return [make("label", {}, make("span", {}, name, " ", value), input), () => Number(input.value)];
  };
  const [heat, temperature] = slider("Temperature", {min: 0, max: 1.5, value: view.temperature});
  const [cut, topP] = slider("Top p", {min: .05, max: 1, value: view.top_p});
  const said = make("p", {role: "status"}, `Stored answer. Choose Write and the model continues your text in ${PLACE}.`);
  const body = make("tbody", {}, ...view.candidates.map(([token, probability]) => row(token, probability)));
  let model, ids = [], start = 0, last, running = false, calls = 0;
  const candidates = () => {
    if (!last) return;
    const kept = nucleus(last, temperature(), topP());
    body.replaceChildren(...kept.slice(0, 8).map(([id, probability]) => row(model.tokenizer.token(id), probability)));
    root.querySelector("caption").textContent = `The next piece: ${kept.length} of ${last.length} may be drawn`;
  };
  const next = async () => {
    const recent = ids.slice(-view.longest);
    [last] = await model.logits(recent, [recent.length - 1]);
    calls++;
    candidates();
  };
  const show = () => {
    before.textContent = model.tokenizer.decode(ids.slice(1, start));
    written.textContent = model.tokenizer.decode(ids.slice(start));
  };
  const go = async count => {
    if (running) return;
    running = true;
    stop.setAttribute("aria-disabled", "false");
    const begun = performance.now();
    await asked(view, said, async opened => {
      model = opened;
      const now = [view.end, ...model.tokenizer.encode(text.value)];
      if (ids.slice(0, start).join() !== now.join()) [ids, start, last] = [now, now.length, null];
      if (count > 1) ids.length = start, last = null;
      let made = 0;
      said.textContent = "Writing \u2026";
      for (; made < count && running; made++) {
        if (!last) await next();
        const id = draw(nucleus(last, temperature(), topP()));
        if (id === view.end) break;
        ids.push(id);
        show();
        await next();
        await new Promise(done => setTimeout(done));  // the browser draws, and hears Stop
      }
      said.textContent = `${made} ${made === 1 ? "piece" : "pieces"} in ${((performance.now() - begun) / 1000).toFixed(1)} s, ${calls} calls of the model so far.`
        + (made < count && running ? " The model ended its review." : "") + (made > 1 ? ` It wrote: ${written.textContent}` : "");
    });
    running = false;
    stop.setAttribute("aria-disabled", "true");
  };
  const stop = press("Stop", () => { running = false; });
  stop.setAttribute("aria-disabled", "true");
  before.textContent = view.opening;
  written.textContent = view.written;
  root.append(make("label", {class: "wide"}, "Beginning of a review", text), make("div", {class: "tools"}, heat, cut),
    make("div", {class: "tools"}, press("Write", () => go(40)), press("One piece", () => go(1)), stop), said,
    make("div", {class: "text", role: "group", "aria-label": "The review"}, before, written),
    table("The next piece", body));
};
