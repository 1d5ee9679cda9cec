// A word of the reader's own is cut into letters, and the merges that apply to it are replayed. `make`: see shell.js.
const build = (root, views) => {
  const now = {view: 0, step: 0, steps: []};
  const field = make("input", {type: "text", maxlength: 28, autocomplete: "off", autocapitalize: "off", spellcheck: "false"});
  const slider = make("input", {type: "range", min: 0, "aria-label": "Merge"});
  const said = make("p", {role: "status"}), strip = make("div", {class: "strip"});
  const button = (text, by) => {
    const made = make("button", {type: "button"}, text);
    made.addEventListener("click", () => go(now.step + by));
    return made;
  };
  const back = button("\u25c0 Back", -1), forward = button("Forward \u25b6", 1);
  const replayed = (word, merges) => {
    const steps = [{pieces: [...word]}];
    merges.forEach(([first, second], i) => {
      const joined = [];
      for (const piece of steps.at(-1).pieces)
        if (joined.at(-1) === first && piece === second) joined.push(joined.pop() + piece); else joined.push(piece);
      if (joined.length < steps.at(-1).pieces.length) steps.push({pieces: joined, rank: i + 1, first, second});
    });
    return steps;
  };
  const cut = () => {
    now.merges = views[now.view][1].merges.split("\n").map(pair => pair.split(" "));
    now.steps = replayed(field.value.trim().split(/\s+/)[0], now.merges);
    slider.max = now.steps.length - 1;
    go(now.steps.length - 1);
  };
  const go = step => {
    const last = now.steps.length - 1;
    if (step < 0 || step > last) return;
    now.step = step;
    slider.value = step;
    back.setAttribute("aria-disabled", step === 0);
    forward.setAttribute("aria-disabled", step === last);
    const {pieces, rank, first, second} = now.steps[step], all = now.merges.length.toLocaleString("en");
    const fresh = rank ? first + second : "";
    strip.replaceChildren(...pieces.map(piece => make("span", {class: piece === fresh ? "piece fresh" : "piece"}, piece)));
    const count = `${pieces.length} piece${pieces.length === 1 ? "" : "s"}`;
    said.textContent = !pieces.length ? "Type a word." : !rank ? `Letters: ${count}.`
      : `Merge ${rank.toLocaleString("en")} of ${all}: ${first} + ${second} \u2192 ${fresh}. ${count}.`;
    if (pieces.length && step === last) said.textContent += " No later merge applies.";
  };
  field.value = views[0][1].word;
  field.addEventListener("input", cut);
  slider.addEventListener("input", () => go(Number(slider.value)));
  const tools = make("div", {class: "tools"}, make("label", {}, "Your word", field), back, forward, slider);
  if (views.length > 1) tools.prepend(menu("Merges", views.map(([name]) => name), 0, i => { now.view = i; cut(); }));
  root.append(tools, strip, said);
  root.addEventListener("keydown", event => {
    const by = {ArrowRight: 1, ArrowLeft: -1}[event.key];
    if (!by || ["SELECT", "INPUT"].includes(event.target.tagName)) return;
    event.preventDefault();
    event.stopPropagation();
    go(now.step + by);
  });
  cut();
};
