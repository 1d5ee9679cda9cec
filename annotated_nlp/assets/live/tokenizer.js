// Reads a tokenizer.json of `tokenizers`: a BPE of bytes (GPT-2) or BERT's WordPiece. Gives encode(text), ids with the
// special tokens around them; decode(ids), the text; and token(id), one piece as it is written in a table. At the end `read`,
// for the models that take such ids: {tokenizer, logits(ids, at)}, a row of numbers for each position in `at`.
const tokenizer = file => {
  const {vocab} = file.model, pieces = [], special = new Map();
  for (const [piece, id] of Object.entries(vocab)) pieces[id] = piece;
  for (const {id, content} of file.added_tokens) { pieces[id] = content; special.set(content, id); }

  // GPT-2's characters for bytes: printable ones stand for themselves, the others come after U+0100.
  const byteChars = [], charBytes = new Map();
  for (let byte = 0, next = 256; byte < 256; byte++) {
    const prints = (byte > 32 && byte < 127) || (byte > 160 && byte !== 173);
    byteChars.push(String.fromCodePoint(prints ? byte : next++));
    charBytes.set(byteChars[byte], byte);
  }

  const bpe = () => {
    const ranks = new Map(file.model.merges.map((pair, rank) => [pair.join(" "), rank]));
    const word = /'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\p{White_Space}\p{L}\p{N}]+|\p{White_Space}+(?!\P{White_Space})|\p{White_Space}+/gu;
    const split = symbols => {
      for (;;) {
        let best = -1, least = Infinity;
        for (let i = 0; i + 1 < symbols.length; i++) {
          const rank = ranks.get(`${symbols[i]} ${symbols[i + 1]}`);
          if (rank < least) [best, least] = [i, rank];
        }
        if (best < 0) return symbols;
        symbols.splice(best, 2, symbols[best] + symbols[best + 1]);
      }
    };
    return text => (text.match(word) || []).flatMap(
      each => split([...new TextEncoder().encode(each)].map(byte => byteChars[byte])).map(piece => vocab[piece]));
  };

  const wordPiece = () => {
    const {unk_token: unknown, max_input_chars_per_word: most, continuing_subword_prefix: mark} = file.model;
    const ideograph = /[\u4e00-\u9fff\u3400-\u4dbf\u{20000}-\u{2a6df}\u{2a700}-\u{2b73f}\u{2b740}-\u{2b81f}\u{2b920}-\u{2ceaf}\uf900-\ufaff\u{2f800}-\u{2fa1f}]/u;
    // One character at a time, as the library does it: the lower case of a sigma doesn't depend on what follows.
    const clean = char => /[\t\n\r]/.test(char) ? " " : /[\ufffd\p{Cc}\p{Cf}\p{Co}\p{Cs}]/u.test(char) ? ""
      : /\p{White_Space}/u.test(char) ? " " : ideograph.test(char) ? ` ${char} ` : char;
    const plain = text => [...[...text].map(clean).join("").normalize("NFD").replace(/\p{Mn}/gu, "")]
      .map(char => char.toLowerCase()).join("");
    const split = word => {
      const chars = [...word], ids = [];
      for (let start = 0; start < chars.length;) {
        let end = chars.length, id;
        while (end > start && (id = vocab[(start ? mark : "") + chars.slice(start, end).join("")]) === undefined) end--;
        if (end === start || chars.length > most) return [vocab[unknown]];
        ids.push(id);
        start = end;
      }
      return ids;
    };
    return text => (plain(text).match(/[!-\/:-@\[-`{-~\p{P}]|[^\p{White_Space}!-\/:-@\[-`{-~\p{P}]+/gu) || []).flatMap(split);
  };

  const words = file.model.type === "BPE" ? bpe() : wordPiece(), bytes = file.model.type === "BPE";
  const escaped = [...special.keys()].map(name => name.replace(/[^\w]/g, "\\$&"));
  const cut = new RegExp(`(${escaped.join("|")})`);
  const around = file.post_processor.single;
  return {
    special,
    encode: text => {
      const inner = text.split(cut).flatMap((part, i) => i % 2 ? [special.get(part)] : words(part));
      return around.flatMap(each => each.Sequence ? inner : file.post_processor.special_tokens[each.SpecialToken.id].ids);
    },
    decode: ids => bytes
      ? new TextDecoder().decode(new Uint8Array([...ids.map(id => pieces[id]).join("")].map(char => charBytes.get(char))))
      : ids.map(id => pieces[id]).join(" ").replaceAll(" ##", ""),
    token: id => bytes && !special.has(pieces[id])
      ? new TextDecoder().decode(new Uint8Array([...pieces[id]].map(char => charBytes.get(char)))) : pieces[id],
  };
};
const read = ({file, run}) => ({tokenizer: tokenizer(file), logits: async (ids, at) => (await run({ids, at})).logits});
