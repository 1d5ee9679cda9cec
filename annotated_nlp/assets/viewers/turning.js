// Rotary positions: a query and a key in several pairs of features, turned by their positions. `make`: see shell.js.
const build = (root, views) => {
  const {pairs, query, key, start, longest} = views[0][1];
  const draw = (tag, attributes = {}, ...children) => {
    const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
    for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
    made.append(...children);
    return made;
  };
  const range = (label, value) => {
    const input = make("input", {type: "range", min: 0, max: longest, value, "aria-label": label});
    input.addEventListener("input", update);
    const shown = make("span");
    return {input, shown, label: make("label", {}, shown, input)};
  };
  const signed = x => x.toFixed(2).replace("-", "\u2212");
  const dials = pairs.map(([name]) => {
    const hands = ["query", "key"].map(who => draw("line", {class: who, x1: 60, y1: 60}));
    const score = make("span"), picture = draw("svg", {viewBox: "0 0 120 120", width: 120, height: 120, "aria-hidden": "true"},
      draw("circle", {cx: 60, cy: 60, r: 50}), ...hands);
    return {hands, score, box: make("div", {class: "dial"}, make("b", {}, name), picture, score)};
  });
  const said = make("p", {role: "status"});
  const asks = range("Position of the query", query), answers = range("Position of the key", key);
  function update() {
    const at = [asks, answers].map(({input}) => Number(input.value));
    asks.shown.textContent = `query at ${at[0]}`;
    answers.shown.textContent = `key at ${at[1]}`;
    let sum = 0;
    pairs.forEach(([, theta], i) => {
      const angles = at.map((position, who) => start[who] + position * theta);
      dials[i].hands.forEach((hand, who) => {
        hand.setAttribute("x2", 60 + 50 * Math.cos(angles[who]));
        hand.setAttribute("y2", 60 - 50 * Math.sin(angles[who]));
      });
      const score = Math.cos(angles[0] - angles[1]);
      dials[i].score.textContent = signed(score);
      sum += score;
    });
    said.textContent = `${Math.abs(at[0] - at[1])} apart. Score, all pairs together: ${signed(sum)}.`;
  }
  const move = (text, by) => {
    const made = make("button", {type: "button"}, text);
    made.addEventListener("click", () => {
      const at = [asks, answers].map(({input}) => Number(input.value));
      const step = Math.max(-Math.min(...at), Math.min(by, longest - Math.max(...at)));
      [asks, answers].forEach(({input}, i) => { input.value = at[i] + step; });
      update();
    });
    return made;
  };
  root.append(make("div", {class: "tools"}, asks.label, answers.label, move("Both back by 10", -10), move("Both on by 10", 10)),
    make("div", {class: "tools"}, ...dials.map(({box}) => box)), said);
  update();
};
