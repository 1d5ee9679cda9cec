// A beam search, a step at a time. `views` holds one: model, text, beam, longest, limit, and `steps`, each with its candidates,
// [[words, score, fate], ...], and what has ended so far, [[words, score], ...], both best first.
const logProbs = logits => {
  const most = Math.max(...logits), all = Math.log(logits.reduce((sum, each) => sum + Math.exp(each - most), 0));
  return logits.map(each => each - most - all);
};
// As `beam_search` of chapter 4 without a length penalty. Each call of what it gives is a step: {candidates, ended, done}.
const search = (next, begin, end, beam, limit) => {
  const best = (all, n) => all.sort((a, b) => b.score - a.score).slice(0, n);  // stable: of equals the first
  let live = [{ids: [], score: 0}], ended = [], n = 0;
  return async () => {
    const rows = await next(live.map(({ids}) => [begin, ...ids])), last = ++n === limit;
    const candidates = best(live.flatMap(({ids, score}, row) => logProbs(rows[row]).map(
      (gain, id) => ({ids: [...ids, id], score: score + gain}))), 2 * beam);
    const ends = ({ids}) => last || ids.at(-1) === end;
    live = candidates.filter(one => !ends(one)).slice(0, beam);
    candidates.forEach((one, rank) => { one.fate = ends(one) && rank < beam ? "ended" : live.includes(one) ? "kept" : "dropped"; });
    ended = best([...ended, ...candidates.filter(({fate}) => fate === "ended")], beam);
    return {candidates, ended, done: !live.length || ended.length === beam && live[0].score <= ended.at(-1).score};
  };
};
const build = (root, [[, view]]) => {
  const text = make("input", {type: "text", autocomplete: "off", spellcheck: "false"});
  text.value = view.text;
  const width = make("input", {type: "range", min: 1, max: 5, value: view.beam}), value = make("span", {"aria-hidden": "true"}, view.beam);
  const said = make("p", {role: "status"}, `Stored answer, with a beam of ${view.beam}. Choose Next step and the model searches for your number in ${PLACE}.`);
  const tables = make("div", {class: "pair search"});
  let {steps} = view, at = steps.length - 1, over = true, step, words, begun;
  const line = ([hypothesis, score, fate]) => make("tr", {class: fate ?? "ended"}, make("td", {lang: "fr"}, hypothesis),
    make("td", {}, score.toFixed(2).replace("-", "\u2212")), ...fate ? [make("td", {}, fate)] : []);
  const show = () => {
    const [candidates, ended] = steps[at];
    tables.replaceChildren(table(`Step ${at + 1}: the best candidates`, make("tbody", {}, ...candidates.map(line)), ["hypothesis", "score", "fate"]),
      table("Ended so far", make("tbody", {}, ...ended.map(line)), ["hypothesis", "score"]));
    back.setAttribute("aria-disabled", at === 0);
  };
  const go = count => asked(view, said, async model => {
    const now = model.source(text.value, view.longest), beam = Number(width.value);
    if (now.wrong) { said.textContent = now.wrong; return; }
    if (begun !== `${beam} ${now.ids}`) {
      step = search(async prefixes => (await model.next(now.ids, prefixes)).logits, model.begin, model.end, beam, view.limit);
      [begun, steps, at, over] = [`${beam} ${now.ids}`, [], -1, false];
      words = ids => ids.map(model.word).join(" ");
    }
    for (let made = 0; made < count && !(over && at === steps.length - 1); made++) {
      if (++at < steps.length) continue;
      const {candidates, ended, done} = await step();
      over = done;
      steps.push([candidates.map(one => [words(one.ids), one.score, one.fate]), ended.map(one => [words(one.ids), one.score])]);
    }
    show();
    tell();
  });
  const tell = () => {
    const count = fate => steps[at][0].filter(one => one[2] === fate).length, [best] = steps[at][1];
    said.textContent = `Step ${at + 1}: ${count("kept")} kept, ${count("dropped")} dropped, ${count("ended")} ended.`
      + (best ? ` Best that has ended: ${best[0]}, ${best[1].toFixed(2).replace("-", "\u2212")}.` : "")
      + (over && at === steps.length - 1 ? " The search stops: nothing that goes on can be better." : "");
  };
  const back = press("Back", () => { at--; show(); tell(); });
  width.addEventListener("input", () => {
    value.textContent = width.value;
    said.textContent = `A beam of ${width.value}: choose Next step to search from the beginning.`;
  });
  text.addEventListener("keydown", event => event.key === "Enter" && go(1));
  show();
  root.append(make("label", {class: "wide"}, "A number, in English words or in digits", text),
    make("div", {class: "tools"}, make("label", {}, make("span", {}, "Width of the beam ", value), width),
      press("Next step", () => go(1)), back, press("To the end", () => go(Infinity))), said, tables);
};
