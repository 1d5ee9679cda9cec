// The translator of numbers: source(text), the English words and their ids, or what is wrong with them; word(id), one piece
// as a reader sees it; next(ids, prefixes), the logits of the word after each prefix, and its attention by layer and head.
const UNITS = ("zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen "
  + "eighteen nineteen").split(" "), TENS = "twenty thirty forty fifty sixty seventy eighty ninety".split(" ");
const ENGLISH = new Set([...UNITS, ...TENS, "hundred", "thousand", "and"]);
const split = (n, by, name) => [...english(Math.floor(n / by)), name, ...n % by ? [...n % by < 100 ? ["and"] : [], ...english(n % by)] : []];
const english = n => n >= 1000 ? split(n, 1000, "thousand") : n >= 100 ? split(n, 100, "hundred") : n < 20 ? [UNITS[n]]
  : [TENS[Math.floor(n / 10) - 2], ...n % 10 ? [UNITS[n % 10]] : []];
const source = text => {
  const number = text.trim();
  if (/^(\d+|\d{1,3}([ ,]\d{3})+)$/.test(number)) {
    const n = Number(number.replace(/[ ,]/g, ""));
    return n > 999999 ? {wrong: `${number} is out of range: choose a number from 0 to 999,999.`} : {words: english(n)};
  }
  const words = number.toLowerCase().match(/[^\s,-]+/g) ?? [], unknown = words.find(word => !ENGLISH.has(word));
  return !words.length ? {wrong: "There is no number: type one in English words, or in digits."}
    : unknown ? {wrong: `The model doesn't know \u201c${unknown}\u201d: write a number up to 999,999 in English words, or in digits alone.`} : {words};
};
const read = ({file, run}) => {
  const {vocab} = file.model, pieces = [];
  for (const [piece, id] of Object.entries(vocab)) pieces[id] = piece.replace("\u2581", "");
  return {
    begin: vocab["[BOS]"], end: vocab["[EOS]"],
    word: id => id === vocab["[EOS]"] ? "END" : pieces[id],
    source: (text, longest) => {
      const {words, wrong} = source(text);
      return wrong ? {wrong} : words.length > longest ? {wrong: `These are ${words.length} words and the model reads ${longest}: take some out.`}
        : {words, ids: words.map(word => vocab["\u2581" + word])};
    },
    next: (ids, prefixes) => run({source: ids, prefixes}),
  };
};
