// In JupyterLab, by anywidget: the model is the one in Python, asked by messages. Before it stand `file`, `views` and the rest.
const PLACE = "Python", WAIT = "Asking Python \u2026", waiting = new Map();
let channel, calls = 0;
const connect = async () => ({
  tokenizer: tokenizer(file),
  logits: (ids, at) => new Promise((done, failed) => {
    waiting.set(++calls, {done, failed, at});
    channel.send({call: calls, ids, at});
  }),
});
export default {render({model, el}) {
  channel = model;
  model.on("msg:custom", ({call, error}, buffers) => {
    const {done, failed, at} = waiting.get(call) ?? {};
    if (!waiting.delete(call)) return;
    if (error) return failed(new Error(error));
    const {buffer, byteOffset, byteLength} = buffers[0];
    const all = new Float32Array(buffer.slice(byteOffset, byteOffset + byteLength)), size = all.length / at.length;
    done(at.map((_, i) => all.slice(i * size, (i + 1) * size)));
  });
  const host = make("div", {"data-lm-suppress-shortcuts": "true", role: "group", "aria-label": `${kind} viewer`});
  const root = host.attachShadow({mode: "open"});
  root.append(make("style", {}, style));
  build(root, views);
  el.append(host);
}};
