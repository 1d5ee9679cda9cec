// Both engines' search boxes ask a class called Fuse. This one ranks as an index of a book would: words that stand in a
// heading or in `index.yml` first, chapters before the laboratory and the appendix. MiniSearch does the rest (BM25).
(() => {
  const IGNORED = new Set(("a an and are as at be by can do does for from how i in is it its of on or should so than that the " +
    "their them there this to use was we what when where which who why with you your").split(" "));
  const words = (text) => text.toLowerCase().split(/[^\p{L}\p{N}]+/u).filter((word) => word.length > 1 || /\d/.test(word));
  // The same word in the singular and the plural, as a verb and as a noun: cut alike, whatever is left over.
  const stem = (word) => IGNORED.has(word) ? null : word.length < 5 ? word
    : word.replace(/(?:ization|isation|izing|ising|ized|ised|izes|ises|ize|ise)$/, "iz").replace(/(?:ies|y)$/, "i")
      .replace(/(?:ings?|ed|es|s|e)$/, "");
  const kind = (href) => /^\d\d_/.test(href) ? 3 : /^(?:lab|glossary|how_to_read|parts\/one_block)/.test(href) ? 1.3
    : /^api\./.test(href) ? 0.3 : 0.8;
  const apart = /#(?:exercises|references|summary|where-the-code-departs-from-the-paper|the-check)$/;

  window.Fuse = class {
    constructor(sections = []) {
      this.sections = [];
      this.index = new MiniSearch({ idField: "at", fields: ["section", "terms", "title", "text"], tokenize: words, processTerm: stem });
      sections.forEach((section) => this.add(section));
    }

    add(section) {
      const { title, section: heading, terms = "", text } = section;
      this.index.add({ at: this.sections.push(section) - 1, title, section: heading || title, terms, text });
    }

    search(query, { limit = 20 } = {}) {
      const options = {
        boost: { section: 6, terms: 6, title: 2 }, prefix: (term) => term.length > 2, fuzzy: (term) => term.length > 5 ? 0.15 : false,
        boostDocument: (at) => {
          const href = this.sections[at].href.replace(/^[./]+/, "");
          return kind(href) * (apart.test(href) ? 0.4 : 1);
        },
      };
      return this.index.search(query, options).slice(0, limit).map((hit) => ({ item: this.sections[hit.id], refIndex: hit.id }));
    }
  };
})();
