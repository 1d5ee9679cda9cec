// The translator writes word by word, with a map of what each word attended to. `views` holds one: model, text, words, longest,
// limit, layers, heads, and `written`, a list of a word and its attention, by layer, head and word of the source.
const build = (root, [[, view]]) => {
  const text = make("input", {type: "text", autocomplete: "off", spellcheck: "false"});
  text.value = view.text;
  const said = make("p", {role: "status"}, `Stored answer. Choose Translate and the model translates your number in ${PLACE}.`);
  const answer = make("div", {class: "text", lang: "fr", role: "group", "aria-label": "The translation"}), map = make("table");
  let {words, written} = view, ids = [], prefix = [];
  const kinds = Array.from({length: view.layers}, (_, layer) => [-1, ...Array(view.heads).keys()].map(head => [layer, head])).flat();
  let chosen = kinds.length - view.heads - 1;
  const heads = menu("Attention of", kinds.map(([layer, head]) => `layer ${layer + 1}, ${head < 0 ? "mean of heads" : `head ${head + 1}`}`),
    chosen, i => { chosen = i; show(); });
  const shares = weights => {
    const [layer, head] = kinds[chosen], all = weights[layer];
    return head < 0 ? words.map((_, i) => all.reduce((sum, one) => sum + one[i], 0) / all.length) : all[head];
  };
  const show = () => {
    answer.textContent = written.map(([word]) => word).filter(word => word !== "END").join(" ");
    map.replaceChildren(make("caption", {}, "Per cent of each French word's attention"),
      make("thead", {}, make("tr", {}, make("td"), ...words.map(word => make("th", {scope: "col"}, word)))),
      make("tbody", {}, ...written.map(([word, weights]) => make("tr", {}, make("th", {scope: "row"}, word), ...shares(weights).map(
        share => make("td", {style: `background: rgb(26 128 192 / ${(.6 * share).toFixed(3)})`}, Math.round(100 * share)))))));
  };
  const go = count => asked(view, said, async model => {
    const begun = performance.now(), now = model.source(text.value, view.longest);
    if (now.wrong) { said.textContent = now.wrong; return; }
    if (count > 1 || ids.join() !== now.ids.join() || prefix.at(-1) === model.end || prefix.length > view.limit) {
      [ids, words, written, prefix] = [now.ids, now.words, [], [model.begin]];
    }
    for (let made = 0; made < count && prefix.length <= view.limit && prefix.at(-1) !== model.end; made++) {
      const {logits: [logits], attention: [weights]} = await model.next(ids, [prefix]), [[id]] = nucleus(logits, 0);
      prefix.push(id);
      written.push([model.word(id), weights]);
      show();
      await new Promise(done => setTimeout(done));  // the browser draws
    }
    const [word, weights] = written.at(-1), last = shares(weights), most = last.indexOf(Math.max(...last));
    said.textContent = count > 1 ? `Translated in ${seconds(begun)}: ${answer.textContent}.`
      : `Word ${written.length}, ${word}, attends most to ${words[most]}: ${percent(last[most])}.`;
  });
  text.addEventListener("keydown", event => event.key === "Enter" && go(Infinity));
  show();
  root.append(make("label", {class: "wide"}, "A number, in English words or in digits", text),
    make("div", {class: "tools"}, press("Translate", () => go(Infinity)), press("Next word", () => go(1)), heads), said, answer,
    make("div", {class: "map", tabindex: 0, role: "group", "aria-label": "Attention map"}, map));
};
