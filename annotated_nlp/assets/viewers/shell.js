// The end of every viewer's script. Before it stand `kind`, `style` and `build(root, views)`, which one of the other files
// defines: it draws the views of one viewer into its shadow root.
const make = (tag, attributes = {}, ...children) => {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children);
  return made;
};
const menu = (label, options, chosen, choose) => {
  const select = make("select", {}, ...options.map((text, i) => make("option", {value: i}, text)));
  select.value = chosen;
  select.addEventListener("change", () => choose(Number(select.value)));
  return make("label", {}, label, select);
};
for (const host of document.querySelectorAll(`.annotated-viewer[data-kind=${kind}]`)) {
  if (host.shadowRoot) continue;
  const root = host.attachShadow({mode: "open"});
  root.append(make("style", {}, style));
  build(root, JSON.parse(host.dataset.views));
}
