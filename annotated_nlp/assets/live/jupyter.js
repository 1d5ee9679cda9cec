// In JupyterLab, by anywidget: the model is the one in Python, asked by messages. Before it stand `file`, `views` and the rest.
const PLACE = "Python", WAIT = "Asking Python \u2026", waiting = new Map();
let channel, calls = 0;
const connect = async () => ({
  file,
  run: inputs => new Promise((done, failed) => {
    waiting.set(++calls, {done, failed});
    channel.send({call: calls, inputs});
  }),
});
export default {render({model, el}) {
  channel = model;
  model.on("msg:custom", ({call, error, sizes}, buffers) => {
    const {done, failed} = waiting.get(call) ?? {};
    if (!waiting.delete(call)) return;
    if (error) return failed(new Error(error));
    done(Object.fromEntries(Object.entries(sizes).map(([name, dims], i) => {
      const {buffer, byteOffset, byteLength} = buffers[i];
      return [name, nest(new Float32Array(buffer.slice(byteOffset, byteOffset + byteLength)), dims)];
    })));
  });
  const host = make("div", {"data-lm-suppress-shortcuts": "true", role: "group", "aria-label": `${kind} viewer`});
  const root = host.attachShadow({mode: "open"});
  root.append(make("style", {}, style));
  build(root, views);
  el.append(host);
}};
