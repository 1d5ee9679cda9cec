// A masked model fills gaps. `views` holds one: model, text, longest, and the stored answers, a list of pieces for each gap.
const build = (root, [[, view]]) => {
  const text = make("textarea", {rows: 2}), answers = make("div", {class: "pair"});
  text.value = view.text;
  const said = make("p", {role: "status"}, `Stored answer. Choose Fill and the model fills the gaps of your text in ${PLACE}.`);
  const filled = make("div", {class: "text", role: "group", "aria-label": "The text with its gaps filled"});
  const show = (parts, gaps) => {
    filled.replaceChildren(...parts.flatMap((part, i) => i ? [make("span", {class: "new"}, gaps[i - 1][0][0]), part] : [part]));
    answers.replaceChildren(...gaps.map((best, i) => table(`Gap ${i + 1}`, make("tbody", {}, ...best.map(([token, probability]) => row(token, probability))))));
  };
  const fill = () => asked(view, said, async ({tokenizer, logits}) => {
    const begun = performance.now(), ids = tokenizer.encode(text.value), mask = tokenizer.special.get("[MASK]");
    const at = [...ids.keys()].filter(i => ids[i] === mask);
    if (!at.length) { said.textContent = "There is no gap: put one into the text with the button Gap."; return; }
    if (ids.length > view.longest) { said.textContent = `The text has ${ids.length} pieces and the model reads ${view.longest}: make it shorter.`; return; }
    const gaps = (await logits(ids, at)).map(one => nucleus(one).slice(0, 5).map(([id, probability]) => [tokenizer.token(id), probability]));
    show(text.value.split("[MASK]"), gaps);
    said.textContent = `Filled in ${seconds(begun)}: ${gaps.map(best => `${best[0][0]}, ${percent(best[0][1])}`).join("; ")}.`;
  });
  const gap = press("Gap", () => {
    text.setRangeText("[MASK]", text.selectionStart, text.selectionEnd, "end");
    text.focus();
  });
  show(view.text.split("[MASK]"), view.answers);
  root.append(make("label", {class: "wide"}, "A text with gaps", text), make("div", {class: "tools"}, press("Fill", fill), gap), said, filled, answers);
};
