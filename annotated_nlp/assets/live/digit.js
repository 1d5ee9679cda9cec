// Draw a digit or choose one, and see what the model reads and where it looked. `views` holds one: model; digits, a list of pixels
// and label; and for the first of them logits and rollout.
const EMPTY = "The pad is empty: draw a digit.";
const build = (root, [[, view]]) => {
  let strokes = [], image = view.digits[0][0], answer = view, label = view.digits[0][1], pen = [16, 16], down = false;
  const pad = make("div", {class: "pad", tabindex: 0, role: "application",
    "aria-label": "Drawing pad: draw with mouse or finger; or move the pen by arrow keys, and press space to put it down or lift it"});
  const said = make("p", {role: "status"}, `Stored answer. Choose Read and the model reads the digit in ${PLACE}.`), result = make("div", {class: "pair search"});
  const cells = (name, background) => make("figure", {}, make("figcaption", {}, name), make("div", {class: "cells", role: "img", "aria-label": name},
    ...image.flatMap((row, y) => row.map((ink, x) => make("i", {style: `background: ${background(ink, y, x)}`})))));
  const grey = (ink, most) => `color-mix(in srgb, currentColor ${(most * ink / 16).toFixed(1)}%, transparent)`;
  const show = () => {
    result.replaceChildren(...image.length ? [cells("What the model sees", ink => grey(ink, 100))] : []);
    if (!answer) return;
    const {logits, rollout} = answer, most = Math.max(...rollout), share = (y, x) => rollout[4 * Math.floor(y / 2) + Math.floor(x / 2)];
    const layers = (ink, y, x) => `linear-gradient(${Array(2).fill(grey(ink, 45))}), rgb(26 128 192 / ${(.8 * share(y, x) / most).toFixed(3)})`;
    result.append(cells("Where it looked", layers), table("What it reads", make("tbody", {}, ...nucleus(logits).slice(0, 5).map(
      ([id, probability]) => row(view.open?.classes[id] ?? String(id), probability))), ["digit", "probability"]));
  };
  const paint = () => {
    const line = stroke => `<polyline points="${[stroke[0], ...stroke].join(" ")}"/>`;
    pad.innerHTML = `<svg viewBox="0 0 32 32" aria-hidden="true">${strokes.map(line).join("")}<circle cx="${pen[0]}" cy="${pen[1]}" r="1"/></svg>`;
  };
  const look = () => asked(view, said, async model => {
    const begun = performance.now();
    if (label === null && !strokes.length) { said.textContent = EMPTY; return; }
    answer = await model.look(image);
    show();
    const [[best, probability]] = nucleus(answer.logits), {rollout} = answer, most = rollout.indexOf(Math.max(...rollout));
    said.textContent = `Read in ${seconds(begun)}: ${model.classes[best]}, ${percent(probability)}.` + (label === null ? "" : ` The writer meant ${label}.`)
      + ` It looked most at row ${Math.floor(most / 4) + 1}, column ${most % 4 + 1} of the 4 by 4 squares.`;
  });
  const drawn = () => {
    [image, answer] = [pixels(strokes), null];
    show();
    if (view.open) return look();
    said.textContent = "Choose Read when your digit is complete.";
  };
  const choose = i => {  // 0: the pad, empty
    [strokes, answer, [image, label]] = [[], null, i ? view.digits[i - 1] : [[], null]];
    choice.querySelector("select").value = i;
    paint();
    show();
    if (i && view.open) return look();
    said.textContent = i ? "Choose Read and the model reads this digit." : EMPTY;
  };
  const begin = point => {
    if (label !== null) choose(0);
    strokes.push([pen = point]);
    paint();
  };
  const extend = point => { strokes.at(-1).push(pen = point); paint(); };
  const at = ({clientX, clientY}) => {
    const {left, top, width, height} = pad.getBoundingClientRect();
    return [32 * (clientX - left) / width, 32 * (clientY - top) / height].map(x => Number(x.toFixed(1)));
  };
  pad.addEventListener("pointerdown", event => { pad.setPointerCapture(event.pointerId); begin(at(event)); });
  pad.addEventListener("pointermove", event => pad.hasPointerCapture(event.pointerId) && extend(at(event)));
  pad.addEventListener("pointerup", drawn);
  pad.addEventListener("pointercancel", drawn);
  pad.addEventListener("keydown", event => {
    const by = {ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1]}[event.key];
    if (!by && event.key !== " ") return;
    event.preventDefault();
    event.stopPropagation();
    if (by) {
      const next = pen.map((x, i) => Math.min(30, Math.max(2, 2 * Math.round(x / 2) + 2 * by[i])));
      if (down) extend(next); else { pen = next; paint(); }
    } else if (down = !down) begin(pen); else return drawn();
    said.textContent = `Pen ${down ? "down" : "up"}, column ${Math.round(pen[0] / 2)} of 15, row ${Math.round(pen[1] / 2)} of 15.`;
  });
  const choice = menu("Or an unseen digit", ["yours", ...view.digits.map(([, digit], i) => `${i + 1}: a ${digit}`)], 1, choose);
  paint();
  show();
  root.append(make("div", {class: "tools"}, press("Read", () => look()), press("Clear", () => choose(0)), choice), said,
    make("div", {class: "pair search"}, make("figure", {}, make("figcaption", {}, "Draw a digit here"), pad), result));
};
