// What the widgets share; `make` is in the viewers' shell.js.
// Numbers in a row as lists in lists of these sizes.
const nest = (data, [size, ...inner]) => inner.length
  ? Array.from({length: size}, (_, i) => nest(data.slice(i * data.length / size, (i + 1) * data.length / size), inner)) : [...data];
// Probabilities after temperature and top p, falling: [[id, probability], ...] of the tokens that stay. Of equals the lower ids stay.
const nucleus = (logits, temperature = 1, topP = 1) => {
  const ids = [...logits.keys()].sort((a, b) => logits[b] - logits[a] || a - b);
  if (temperature === 0) return [[ids[0], 1]];
  const raw = ids.map(id => Math.exp((logits[id] - logits[ids[0]]) / temperature)), all = raw.reduce((a, b) => a + b);
  let before = 0;
  const kept = raw.filter(each => { const stays = topP >= 1 || before / all < topP; before += each; return stays; });
  const sum = kept.reduce((a, b) => a + b);
  return kept.map((each, i) => [ids[i], each / sum]);
};
const draw = kept => {
  let left = Math.random();
  for (const [id, probability] of kept) if ((left -= probability) < 0) return id;
  return kept.at(-1)[0];
};
const percent = probability => probability < .001 ? "< 0.1 %" : `${(100 * probability).toFixed(1)} %`;
const visible = token => token.replace(/ /g, "\u2423").replace(/\n/g, "\u21b5");
const row = (token, probability) => make("tr", {}, make("td", {}, visible(token)), make("td", {class: "share"},
  make("i", {style: `width: ${(8 * probability).toFixed(3)}rem`, "aria-hidden": "true"}), percent(probability)));
const table = (caption, body, columns = ["piece", "probability"]) => make("table", {}, make("caption", {}, caption),
  make("thead", {}, make("tr", {}, ...columns.map(name => make("th", {scope: "col"}, name)))), body);
const press = (text, does) => {
  const made = make("button", {type: "button"}, text);
  made.addEventListener("click", () => made.getAttribute("aria-disabled") !== "true" && does());
  return made;
};
const seconds = begun => `${((performance.now() - begun) / 1000).toFixed(2)} s`;
// Runs `work(model)`, where `read` made the model of what is connected, and says how it stands; what goes wrong is a
// sentence, and the stored answer stays.
const asked = async (view, said, work) => {
  try {
    if (!view.open) said.textContent = WAIT;
    view.open ??= read(await connect(view.model));
    await work(view.open);
  } catch (error) {
    said.textContent = `The model doesn't run here: ${error.message}. The answer below was stored when the page was made.`;
  }
};
