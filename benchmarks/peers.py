"""Who is compared with whom: our model, its peer with the same weights, and what both are asked to do.

Each side is called as its own documentation calls it. All ways of running a peer are tried ("eager" and "compiled",
for generation "dynamic" and "static" cache), and the fastest of them counts.
"""

from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from tempfile import TemporaryDirectory

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from annotated_nlp.attention import Attention, CrossAttention
from annotated_nlp.bert import BertConfig, BertForMaskedLM
from annotated_nlp.decoding import beam_search, greedy
from annotated_nlp.electra import ElectraConfig, ElectraForPreTraining
from annotated_nlp.gpt import GPT, GPTConfig
from annotated_nlp.llama import Llama, LlamaConfig
from annotated_nlp.t5 import T5, T5Config
from annotated_nlp.tasks.costs import Shape
from annotated_nlp.transformer import Transformer, TransformerConfig
from annotated_nlp.vit import ViT, ViTConfig

Batch = dict[str, Tensor]
Writer = Callable[[Tensor, int, int], Tensor]  # prompts (b n), new tokens, beam; gives the new tokens


@dataclass(frozen=True)
class Size:
    "How much work one call gets: `rows` of `length` for a pass, `prompt` tokens before `new` ones to be generated."

    rows: int
    length: int
    prompt: int = 0
    new: int = 0


class Contest:
    """A model of ours against the same model of a peer.

    `sizes` holds one size for each kind of device, and a tiny one. A `side` is "ours" or "theirs".
    """

    name: str
    peer = "transformers"
    architecture: str  # its class there
    generates = False
    sizes = {"cpu": Size(2, 64), "cuda": Size(32, 512), "tiny": Size(2, 8)}

    def ours(self, tiny: bool) -> nn.Module:
        raise NotImplementedError

    def theirs(self, ours: nn.Module) -> nn.Module:
        "The peer with our weights, by way of the files that both read and write."
        import transformers

        with TemporaryDirectory() as folder:
            ours.save_pretrained(folder)
            kind = getattr(transformers, self.architecture)
            return kind.from_pretrained(folder, attn_implementation="sdpa")

    def batch(self, ours: nn.Module, size: Size) -> Batch:
        raise NotImplementedError

    def logits(self, side: str, model: nn.Module, batch: Batch) -> Tensor:
        out = model(batch["ids"])
        return out if side == "ours" else out.logits

    def loss(self, side: str, model: nn.Module, batch: Batch) -> Tensor:
        "The same loss on the logits of both."
        logits = self.logits(side, model, batch)
        return F.cross_entropy(logits.flatten(0, -2), batch["targets"].flatten())

    def writer(self, side: str, mode: str, model: nn.Module) -> Writer:
        "What continues prompts; greedily for a beam of 1."
        if side == "theirs":
            return partial(_generate, model, mode)
        step = torch.compile(model.step, dynamic=True) if mode == "compiled" else model.step

        def write(prompts: Tensor, new: int, beam: int) -> Tensor:
            state, last = self.start(model, prompts, new)
            if beam == 1:
                return greedy(step, state, last, max_new_tokens=new).ids
            return beam_search(step, state, last, beam=beam, max_new_tokens=new).ids[:, 0]

        return write

    def shape(self, ours: nn.Module) -> Shape | None:
        "For counting the arithmetic of a training step, where the share of a card's peak is asked for."
        return None


def random_ids(vocab_size: int, *shape: int) -> Tensor:
    return torch.randint(4, vocab_size, shape)  # without the special tokens


def _generate(model: nn.Module, mode: str, prompts: Tensor, new: int, beam: int) -> Tensor:
    "transformers' `generate`, with the search that `decoding.beam_search` makes."
    search = dict(num_beams=beam, early_stopping="never", length_penalty=0.0) if beam > 1 else {}
    cache = dict(cache_implementation="static") if mode == "static" else {}
    rules = dict(attention_mask=torch.ones_like(prompts), max_new_tokens=new, do_sample=False)
    return model.generate(prompts, **rules, **search, **cache)[:, -new:]


class _Writing(Contest):
    generates = True
    sizes = {"cpu": Size(2, 64, 16, 32), "cuda": Size(16, 512, 64, 128), "tiny": Size(2, 8, 3, 4)}

    def theirs(self, ours):
        model = super().theirs(ours)
        model.generation_config.eos_token_id = None  # both write all the tokens that are asked for
        model.generation_config.pad_token_id = 0
        return model


class Bert(Contest):
    "Masked language modelling; of each six pieces one is asked for, about the paper's share."

    name, architecture = "BERT-base", "BertForMaskedLM"

    def ours(self, tiny):
        sizes = dict(vocab_size=99, d_model=32, n_heads=2, d_ff=64, n_layers=2) if tiny else {}
        return BertForMaskedLM(BertConfig.base(dropout=0.0, **sizes))

    def batch(self, ours, size):
        ids, pieces = (random_ids(ours.config.vocab_size, size.rows, size.length) for _ in range(2))
        chosen = torch.zeros_like(ids, dtype=torch.bool)
        chosen[:, 1::6] = True
        rows, places = chosen.nonzero(as_tuple=True)
        return dict(ids=ids, labels=pieces.masked_fill(~chosen, -100), rows=rows, places=places, targets=pieces[chosen])

    def loss(self, side, model, batch):
        "Ours makes logits where pieces are asked for and nowhere else; transformers is given its labels."
        if side == "theirs":
            return model(batch["ids"], labels=batch["labels"]).loss
        states = model.trunk(batch["ids"])[batch["rows"], batch["places"]]
        return F.cross_entropy(model.pieces(states), batch["targets"])


class Gpt2(_Writing):
    name, architecture = "GPT-2 124M", "GPT2LMHeadModel"
    sizes = _Writing.sizes | {"cuda": Size(32, 1024, 64, 128)}

    def ours(self, tiny):
        sizes = dict(vocab_size=99, max_len=64, d_model=32, n_heads=2, n_layers=2) if tiny else {}
        return GPT(GPTConfig.gpt2(dropout=0.0, **sizes))

    def batch(self, ours, size):
        ids = random_ids(ours.config.vocab_size, size.rows, size.length + 1)
        return dict(ids=ids[:, :-1].contiguous(), targets=ids[:, 1:].contiguous())

    def start(self, model, prompts, new):
        return model.start(prompts[:, :-1], max_len=prompts.shape[1] - 1 + new), prompts[:, -1].contiguous()

    def shape(self, ours):
        c = ours.config
        return Shape(c.vocab_size, c.d_model, c.d_ff, c.n_layers)


class SmolLM2(_Writing):
    "With its real weights where one text is written (`switches`)."

    name, architecture = "SmolLM2 135M", "LlamaForCausalLM"

    def ours(self, tiny):
        sizes = dict(vocab_size=99, d_model=32, n_heads=4, n_kv_heads=2, d_ff=64, n_layers=2) if tiny else {}
        return Llama(LlamaConfig.smollm2(**sizes))


class Electra(Contest):
    name, architecture = "ELECTRA-small", "ElectraForPreTraining"

    def ours(self, tiny):
        sizes = dict(vocab_size=99, d_embedding=16, d_model=32, n_heads=2, d_ff=64, n_layers=2) if tiny else {}
        return ElectraForPreTraining(ElectraConfig.small(dropout=0.0, **sizes))

    def batch(self, ours, size):
        ids = random_ids(ours.config.vocab_size, size.rows, size.length)
        return dict(ids=ids, replaced=(torch.rand(ids.shape) < 0.1).float())

    def loss(self, side, model, batch):
        return F.binary_cross_entropy_with_logits(self.logits(side, model, batch), batch["replaced"])


class T5Small(_Writing):
    name, architecture = "T5-small", "T5ForConditionalGeneration"
    config = staticmethod(T5Config.small)

    def ours(self, tiny):
        sizes = dict(vocab_size=99, d_model=32, n_heads=2, d_head=16, d_ff=64, n_layers=2) if tiny else {}
        return T5(self.config(dropout=0.0, **sizes))

    def batch(self, ours, size):
        src, tgt, targets = (random_ids(ours.config.vocab_size, size.rows, size.length) for _ in range(3))
        return dict(src=src, tgt=tgt, targets=targets)

    def logits(self, side, model, batch):
        if side == "ours":
            return model(batch["src"], batch["tgt"])
        return model(batch["src"], decoder_input_ids=batch["tgt"]).logits

    def start(self, model, prompts, new):
        first = torch.full_like(prompts[:, 0], model.config.pad_id)
        return model.start(prompts, max_len=new), first


class T5Base(T5Small):
    name = "T5-base"
    sizes = _Writing.sizes | {"cpu": Size(1, 64, 16, 16)}
    config = staticmethod(T5Config.base)


class ViTB16(Contest):
    name, architecture = "ViT-B/16", "ViTForImageClassification"
    sizes = {"cpu": Size(1, 197), "cuda": Size(128, 197), "tiny": Size(2, 5)}  # patches and the class token

    def ours(self, tiny):
        sizes = dict(image_size=32, d_model=32, n_heads=2, d_ff=64, n_layers=2) if tiny else {}
        return ViT(ViTConfig.b16(**sizes | dict(n_classes=10 if tiny else 1000)))

    def batch(self, ours, size):
        c = ours.config
        images = torch.randn(size.rows, c.n_channels, c.image_size, c.image_size)
        return dict(ids=images, targets=torch.randint(c.n_classes, (size.rows,)))


class ViTB16Timm(ViTB16):
    "The same against timm, where it is installed."

    peer = "timm"

    def theirs(self, ours):
        from timm.models.vision_transformer import VisionTransformer

        c = ours.config
        model = VisionTransformer(
            img_size=c.image_size, patch_size=c.patch_size, num_classes=c.n_classes, embed_dim=c.d_model,
            depth=c.n_layers, num_heads=c.n_heads, mlp_ratio=c.d_ff / c.d_model,
        )
        names = {
            "embedding.patches": "patch_embed.proj", "embedding.places": "pos_embed", "embedding.tokens": "cls_token",
            "stack.": "", "attention.norm": "norm1", "attention.layer.query_key_value": "attn.qkv",
            "attention.layer.out": "attn.proj",
            "feed_forward.norm": "norm2", "feed_forward.layer.up": "mlp.fc1", "feed_forward.layer.down": "mlp.fc2",
        }
        weights = {}
        for name, value in ours.state_dict().items():
            for mine, their in names.items():
                name = name.replace(mine, their)
            weights[name] = value
        model.load_state_dict(weights)
        return model

    def logits(self, side, model, batch):
        return model(batch["ids"])


class PyTorchs(nn.Module):
    "nn.Transformer between our embedding and its tied output layer; it has none of its own."

    def __init__(self, ours: Transformer):
        super().__init__()
        c = ours.config
        self.embedding = deepcopy(ours.src_embedding)
        sizes = dict(d_model=c.d_model, nhead=c.n_heads, dim_feedforward=c.d_ff, dropout=c.dropout)
        depth = dict(num_encoder_layers=c.n_layers, num_decoder_layers=c.n_layers)
        self.core = nn.Transformer(**sizes, **depth, batch_first=True)
        self.core.encoder.norm = self.core.decoder.norm = None  # post-norm, as in the paper, needs no last one
        with torch.no_grad():
            for mine, their in zip((ours.encoder, ours.decoder.stack), (self.core.encoder, self.core.decoder)):
                for block, layer in zip(mine.blocks, their.layers):
                    self._copy(block, layer)

    def _copy(self, block: nn.Module, layer: nn.Module) -> None:
        for i, sublayer in enumerate(filter(None, (block.attention, block.cross, block.feed_forward)), 1):
            getattr(layer, f"norm{i}").load_state_dict(sublayer.norm.state_dict())
        self._copy_attention(block.attention.layer, layer.self_attn)
        if block.cross is not None:
            self._copy_attention(block.cross.layer, layer.multihead_attn)
        layer.linear1.load_state_dict(block.feed_forward.layer.up.state_dict())
        layer.linear2.load_state_dict(block.feed_forward.layer.down.state_dict())

    def _copy_attention(self, mine: Attention, their: nn.MultiheadAttention) -> None:
        parts = [mine.query, mine.key_value] if isinstance(mine, CrossAttention) else [mine.query_key_value]
        their.in_proj_weight.copy_(torch.cat([part.weight for part in parts]))
        their.in_proj_bias.copy_(torch.cat([part.bias for part in parts]))
        their.out_proj.load_state_dict(mine.out.state_dict())

    def forward(self, src: Tensor, tgt: Tensor, padding: Tensor) -> Tensor:
        later = torch.ones(tgt.shape[1], tgt.shape[1], dtype=torch.bool, device=tgt.device).triu(1)
        x = self.core(self.embedding(src), self.embedding(tgt), tgt_mask=later, tgt_is_causal=True,
                      src_key_padding_mask=padding, memory_key_padding_mask=padding)
        return self.embedding.logits(x)


class Translator(Contest):
    "Vaswani's base model on sources of different lengths: each row has a few pads fewer than the one before."

    name, peer = "Transformer base", "nn.Transformer"

    def ours(self, tiny):
        sizes = dict(vocab_size=99, d_model=32, n_heads=2, d_ff=64, n_layers=2) if tiny else {}
        return Transformer(TransformerConfig.base(dropout=0.0, **sizes))

    def theirs(self, ours):
        return PyTorchs(ours)

    def batch(self, ours, size):
        src, tgt, targets = (random_ids(ours.config.src_vocab_size, size.rows, size.length) for _ in range(3))
        lengths = torch.linspace(size.length // 2, size.length, size.rows).long()
        real = torch.arange(size.length) < lengths[:, None]
        return dict(src=src, tgt=tgt, targets=targets, real=real)

    def logits(self, side, model, batch):
        if side == "ours":
            return model(batch["src"], batch["tgt"], batch["real"])
        return model(batch["src"], batch["tgt"], ~batch["real"])


CONTESTS = [Bert(), Gpt2(), Electra(), T5Small(), T5Base(), ViTB16(), Translator()]
if find_spec("timm"):
    CONTESTS.insert(-1, ViTB16Timm())
