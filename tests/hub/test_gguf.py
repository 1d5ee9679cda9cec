"GGUF files: read as `transformers` reads them, refused where they can't be."

import random

import numpy as np
import pytest
import torch
import transformers
from gguf import GGMLQuantizationType, GGUFWriter, RopeScalingType, quantize
from tokenizers import pre_tokenizers
from torch.testing import assert_close

import annotated_nlp
from annotated_nlp.hub import gguf, tokenizers
from annotated_nlp.llama import Llama

SUPER = {"Q4_K": (144, {0: 3e-4, 2: 2.2e-3}), "Q5_K": (176, {0: 1.5e-4, 2: 2.2e-3}), "Q6_K": (210, {208: 1e-4})}
KINDS = ["F32", "F16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", *SUPER]
HEADS, KV = 4, 2


def pieces():
    "A byte-level vocabulary with a few merges and two control pieces."
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = ["Ġ t", "h e", "Ġt he", "i n", "Ġ f", "Ġf i", "l m", "Ġfi lm"]
    return ["<|endoftext|>", "<|im_end|>", *letters, *("".join(merge.split()) for merge in merges)], merges


def blocks(shape, kind, g):
    "Random weights in blocks of 256, which the library unpacks and doesn't pack: random bytes, but for the scales, two bytes each."
    size, scales = SUPER[kind]
    made = torch.randint(256, (*shape[:-1], shape[-1] // 256, size), generator=g, dtype=torch.uint8).numpy()
    for at, scale in scales.items():
        made[..., at : at + 2] = np.array([scale], np.float16).view(np.uint8)
    return made.reshape(*shape[:-1], -1)


def write(path, kind="F32", tied=False, **changes):
    "A file of two layers with random weights, packed as `kind`."
    width, wide = (256, 256) if kind in SUPER else (64, 96)
    g = torch.Generator().manual_seed(0)
    tokens, merges = pieces()
    facts = dict(block_count=2, context_length=40, embedding_length=width, feed_forward_length=wide, head_count=HEADS,
                 head_count_kv=KV, layer_norm_rms_eps=1e-5, rope_freq_base=500.0, architecture="llama", pre="gpt-2", model="gpt2") | changes
    file = GGUFWriter(path, facts["architecture"])
    for name in ("block_count", "context_length", "embedding_length", "feed_forward_length", "head_count", "head_count_kv", "layer_norm_rms_eps", "rope_freq_base"):
        getattr(file, f"add_{name}")(facts[name])
    if "rope_scaling_type" in facts:
        file.add_rope_scaling_type(RopeScalingType(facts["rope_scaling_type"]))
    if "rope_dimension_count" in facts:
        file.add_rope_dimension_count(facts["rope_dimension_count"])
    file.add_tokenizer_model(facts["model"])
    file.add_tokenizer_pre(facts["pre"])
    file.add_token_list(tokens)
    file.add_token_merges(merges)
    file.add_token_types([3, 3] + [1] * (len(tokens) - 2))
    file.add_bos_token_id(0)
    file.add_eos_token_id(1)
    file.add_unk_token_id(0)
    file.add_chat_template("{{ messages[0]['content'] }}")
    shapes = {"token_embd": (len(tokens), width), "output_norm": (width,)} | ({} if tied else {"output": (len(tokens), width)})
    for i in range(2):
        block = dict(attn_norm=(width,), ffn_norm=(width,), attn_q=(width, width), attn_k=(width * KV // HEADS, width), attn_v=(width * KV // HEADS, width),
                     attn_output=(width, width), ffn_gate=(wide, width), ffn_up=(wide, width), ffn_down=(width, wide))
        shapes |= {f"blk.{i}.{name}": shape for name, shape in block.items()}
    shapes |= {name: (3, 32) for name in facts.get("more", ())}
    for name, shape in shapes.items():
        values = (torch.randn(shape, generator=g) * (0.3 if len(shape) > 1 else 0.1) + (len(shape) == 1)).numpy()
        if len(shape) == 1 or kind == "F32":
            file.add_tensor(f"{name}.weight", values)
        elif kind in SUPER:
            file.add_tensor(f"{name}.weight", blocks(shape, kind, g), raw_dtype=GGMLQuantizationType[kind])
        else:
            packing = GGMLQuantizationType[kind]
            file.add_tensor(f"{name}.weight", quantize(values, packing), raw_dtype=packing)
    file.write_header_to_file()
    file.write_kv_data_to_file()
    file.write_tensors_to_file()
    file.close()
    return path


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_as_transformers_reads_it(kind, tied, tmp_path):
    path = write(tmp_path / "small.gguf", kind, tied)
    ours = Llama.from_pretrained(path)
    theirs = transformers.LlamaForCausalLM.from_pretrained(tmp_path, gguf_file=path.name, dtype=torch.float32).eval()
    assert ours.config.tied == tied and ours.config.eos_id == 1 and ours.config.base == 500
    ids = torch.randint(len(pieces()[0]), (3, 17))
    with torch.no_grad():
        assert_close(ours(ids), theirs(ids).logits, atol=1e-4, rtol=0)
    ours.save_pretrained(tmp_path / "whole")  # transformers refuses to save a model that it read from such a file
    again = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "whole")
    with torch.no_grad():
        assert_close(again(ids).logits, theirs(ids).logits, atol=1e-4, rtol=0)


def strings(count):
    "Spaces of all kinds, digits, marks, control pieces, emoji, scripts from right to left, and nothing at all."
    draw = random.Random(0)
    parts = ["the film", " ", "  ", "\n", "\t", "\u00a0", "123", "4,5", "'s", "'LL", "don't", "é", "e\u0301", "日本", "שלום", "🙂", "👩‍🚀", "<|im_end|>", "<|endoftext|>",
             "<|im_", "…", "\u200b", "Ġ", "ﬁ", "A", "z", "_", "-", "\r\n", "\x00", "٣", "²"]
    return ["", *("".join(draw.choices(parts, k=draw.randint(1, 12))) for _ in range(count))]


def test_tokenizer_as_transformers_builds_it(tmp_path):
    path = write(tmp_path / "small.gguf")
    ours, theirs = tokenizers.load(path), transformers.AutoTokenizer.from_pretrained(tmp_path, gguf_file=path.name)
    for text in strings(2000):
        assert ours.encode(text, add_special_tokens=False).ids == theirs(text, add_special_tokens=False).input_ids, text
    assert tokenizers.special(ours).eos == 1 and ours.template == "{{ messages[0]['content'] }}"
    ours.encode_special_tokens = True
    assert 1 not in ours.encode("<|im_end|>").ids


def test_digits_one_by_one_and_in_threes(tmp_path):
    "The two other ways to cut, as transformers has them in the tokenizers of SmolLM2 and Llama 3."
    texts = ["in 1984, 12345 films", "don't  stop", "Über 3.5%\n\nyes"]
    for pre, wanted in (("smollm", ["in", " ", "1", "9", "8", "4"]), ("llama-bpe", ["in", " ", "198", "4"])):
        cut = gguf._CUTS[pre]().pre_tokenize_str(texts[0])
        assert [piece.replace("Ġ", " ") for piece, _ in cut][: len(wanted)] == wanted
        made = tokenizers.load(write(tmp_path / f"{pre}.gguf", pre=pre))
        for text in texts:
            assert made.decode(made.encode(text).ids) == text


def test_model_and_tokenizer_in_one(tmp_path):
    model, tokenizer = annotated_nlp.load(write(tmp_path / "small.gguf", "Q8_0"))
    assert isinstance(model, Llama) and not model.training
    ids = torch.tensor([tokenizer.encode("the film in the film").ids])
    assert model.generate(ids, 5, stop_id=-1).shape == (1, 5)


@pytest.mark.parametrize("changes, said", [
    (dict(architecture="qwen2"), ["general.architecture='qwen2'", "only 'llama'", "model.safetensors"]),
    (dict(head_count_kv=4), ["other shapes", "self_attn.k_proj"]),
    (dict(more=["rope_freqs"]), ["no place for", "rope_freqs"]),
])
def test_refused(changes, said, tmp_path):
    path = write(tmp_path / "small.gguf", **changes)
    with pytest.raises(ValueError) as error:
        Llama.from_pretrained(path)
    assert all(word in str(error.value) for word in said), error.value


@pytest.mark.parametrize("changes, said", [(dict(model="llama"), ["'llama'", "gpt2", "tokenizer.json"]), (dict(pre="qwen2"), ["'qwen2'", "smollm"])])
def test_tokenizers_refused(changes, said, tmp_path):
    with pytest.raises(ValueError) as error:
        tokenizers.load(write(tmp_path / "small.gguf", **changes))
    assert all(word in str(error.value) for word in said), error.value


@pytest.mark.parametrize("damage", [lambda b: b[: len(b) // 2], lambda b: b"GGUX" + b[4:], lambda b: b"", lambda b: b[:4] + b"\xff" * 20 + b[24:]])
def test_damaged(damage, tmp_path):
    path = write(tmp_path / "small.gguf")
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(ValueError, match="damaged"):
        Llama.from_pretrained(path)


@pytest.mark.parametrize("scaling", ["yarn", "linear"])
def test_a_scaled_rotation_is_refused(scaling, tmp_path):
    with pytest.raises(ValueError, match=f"rope_scaling='{scaling}'"):
        Llama.from_pretrained(write(tmp_path / "small.gguf", rope_scaling_type=scaling))


def test_a_rotation_that_says_it_is_plain(tmp_path):
    plain, said = (Llama.from_pretrained(write(tmp_path / f"{len(facts)}.gguf", **facts)) for facts in ({}, dict(rope_scaling_type="none", rope_dimension_count=16)))
    ids = torch.arange(9)[None]
    assert torch.equal(plain(ids), said(ids))
    with pytest.raises(ValueError, match="rope.dimension_count=8 of 16"):
        Llama.from_pretrained(write(tmp_path / "half.gguf", rope_dimension_count=8))


def test_a_block_unpacked_by_hand():
    "Q4_0: sixteen bytes of two weights each, 8 subtracted, times the scale in front."
    values = np.random.default_rng(0).standard_normal((1, 32)).astype(np.float32)
    packed = quantize(values, GGMLQuantizationType.Q4_0).tobytes()
    scale, halves = np.frombuffer(packed[:2], np.float16).astype(np.float32), np.frombuffer(packed[2:], np.uint8)
    by_hand = scale * (np.concatenate([halves & 15, halves >> 4]).astype(np.float32) - 8)
    assert np.abs(by_hand - values[0]).max() <= np.abs(scale[0]) * 1.01
