"Layouts: every class finds its tables, and a model that nobody else has keeps its own names."

import json
import pickle
from dataclasses import dataclass, fields

import pytest
import torch
from annotated_nlp.bert import Bert, BertConfig, BertForMaskedLM
from annotated_nlp.gpt import GPT, GPTConfig
from annotated_nlp.hub import layouts
from annotated_nlp.hub.checkpoints import layouts_of
from annotated_nlp.hub.layouts import LAYOUTS, Layout
from annotated_nlp.parts.model import Pretrained, reset_buffers
from annotated_nlp.transformer import Transformer, TransformerConfig
from annotated_nlp.vit import DeiT, DeiTConfig, ViTConfig
from safetensors.torch import load_file
from torch import nn

SMALL = dict(d_model=24, n_heads=4, d_ff=30, n_layers=2)
BERT = BertConfig(vocab_size=43, max_len=16, **SMALL)


def transformer(seed=0, **changes):
    torch.manual_seed(seed)
    sizes = dict(src_vocab_size=31, tgt_vocab_size=37, max_len=19)
    return Transformer(TransformerConfig(**sizes | SMALL | changes)).eval()


def equal(one, other):
    one, other = one.state_dict(), other.state_dict()
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


# Which class has which tables


def test_tables_name_no_model():
    "The module is on the ground floor: it imports no model, and each class takes its own configuration."
    assert not [name for name in vars(layouts) if name in LAYOUTS]
    assert {type(x.config) for tables in LAYOUTS.values() for x in tables} == {type(None)}
    assert layouts_of(Bert)[0].config is BertConfig and layouts_of(GPT)[1].config is GPTConfig
    assert layouts_of(DeiT)[0].config is DeiTConfig  # though it may be made with a ViTConfig
    assert isinstance(DeiT(ViTConfig(image_size=8, patch_size=4, **SMALL)), DeiT)


def test_every_table_belongs_to_a_class():
    import importlib
    for name in LAYOUTS:
        found = [getattr(importlib.import_module(f"annotated_nlp.{module}"), name, None)
                 for module in ("transformer", "contextual", "gpt", "llama", "bert", "bert_family", "electra", "t5", "vit", "captioning", "parts.deberta")]
        assert len({x for x in found if x}) == 1, name


def test_a_child_has_its_parents_tables(tmp_path):
    class Mine(BertForMaskedLM):
        pass

    class Mined(Mine):
        def __init__(self, config):  # says nothing of its configuration
            super().__init__(config)

    for kind in (Mine, Mined):
        torch.manual_seed(0)
        model = kind(BERT).eval()
        assert layouts_of(kind) == layouts_of(BertForMaskedLM)
        model.save_pretrained(tmp_path)
        assert json.loads((tmp_path / "config.json").read_text())["architectures"] == ["BertForMaskedLM"]
        back = kind.from_pretrained(tmp_path)
        assert type(back) is kind and equal(back, model)


def test_a_child_with_another_configuration(tmp_path):
    @dataclass(frozen=True, kw_only=True)
    class Config(BertConfig):
        def twice(self):
            return 2 * self.d_model

    class Mine(Bert):
        def __init__(self, config: Config):
            super().__init__(config)

    Mine(Config(vocab_size=43, max_len=16, **SMALL)).save_pretrained(tmp_path)
    assert Mine.from_pretrained(tmp_path).config.twice() == 48
    assert layouts_of(Bert)[0].config is BertConfig


def test_a_class_without_tables_says_so(tmp_path):
    class Nobody(Pretrained, nn.Module):
        pass

    (tmp_path / "config.json").write_text('{"model_type": "bert"}')
    for call in (lambda: Nobody.from_pretrained(tmp_path), lambda: Nobody().save_pretrained(tmp_path / "x")):
        with pytest.raises(ValueError, match="Nobody has no layouts: set layouts"):
            call()


def test_models_can_be_pickled():
    model = Bert(BERT)
    assert equal(pickle.loads(pickle.dumps(model)), model)
    assert pickle.loads(pickle.dumps(layouts_of(Bert))) == layouts_of(Bert)


# Our own names


@pytest.mark.parametrize("changes", [
    {}, dict(shared_vocab=True, tgt_vocab_size=31), dict(positions="learned", norm_first=True), dict(norm="rms", bias=False),
    dict(gated=True, activation="gelu", d_head=5, scale=0.5, dropout=0.25, eps=1 / 3, pad_id=3),
], ids=str)
@pytest.mark.parametrize("size", ["5GB", "10KB"])
def test_transformer_and_back(changes, size, tmp_path):
    model = transformer(**changes)
    model.save_pretrained(tmp_path, max_shard_size=size)
    back = Transformer.from_pretrained(tmp_path)
    assert back.config == model.config and equal(back, model) and not back.training
    src, tgt = torch.randint(1, 30, (2, 3, 19))
    assert torch.equal(back(src, tgt), model(src, tgt))


def test_our_own_names_and_settings(tmp_path):
    "One option a setting, whichever settings there are; one tensor a parameter."
    model = transformer()
    model.save_pretrained(tmp_path)
    written = json.loads((tmp_path / "config.json").read_text())
    assert written.pop("architectures") == ["Transformer"]
    assert written.pop("model_type") == "annotated_nlp_transformer"
    assert written == {x.name: getattr(model.config, x.name) for x in fields(model.config)}
    stored = load_file(tmp_path / "model.safetensors")
    assert stored.keys() == dict(model.named_parameters()).keys()
    assert all(torch.equal(stored[name], p) for name, p in model.named_parameters())


@pytest.mark.parametrize("change, message", [
    (dict(gadgets=3), "gadgets=3 in config.json: this model has no such setting"),
    (dict(d_model="24"), "d_model='24' in config.json is no int"),
    (dict(norm_first=1), "norm_first=1 in config.json is no bool"),
    (dict(d_head=2.5), "d_head=2.5 in config.json is no int"),
    (dict(src_vocab_size=None), "config.json lacks src_vocab_size"),
    (dict(norm="batch"), "norm='batch'"),
], ids=str)
def test_edited_to_nonsense(change, message, tmp_path):
    transformer().save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(ValueError, match=message):
        Transformer.from_pretrained(tmp_path)


def test_tables_that_are_not_saved(tmp_path):
    "The sines and cosines are no parameters and not in the file; they are computed, and no random number is drawn."
    model = transformer()
    model.save_pretrained(tmp_path)
    assert not [name for name in load_file(tmp_path / "model.safetensors") if "positions" in name]
    torch.manual_seed(5)
    back = Transformer.from_pretrained(tmp_path)
    drawn = torch.rand(3)
    torch.manual_seed(5)
    assert torch.equal(torch.rand(3), drawn)
    src, tgt = torch.randint(1, 30, (2, 3, 19))
    assert torch.equal(back(src, tgt), model(src, tgt))


def test_built_without_values():
    "On the meta device, given memory, then weights: the sines and cosines are computed again."
    model = transformer()
    with torch.device("meta"):
        other = Transformer(model.config)
    other.to_empty(device="cpu")
    for buffer in other.buffers():
        buffer.fill_(torch.nan)
    other.load_state_dict(model.state_dict())
    reset_buffers(other)
    src, tgt = torch.randint(1, 30, (2, 3, 19))
    assert torch.equal(other.eval()(src, tgt), model(src, tgt))


def test_a_model_of_ones_own(tmp_path):
    "Three lines make any module one that is saved and loaded, with buffers of both kinds."
    @dataclass
    class Config:
        width: int
        rate: float = 0.5

    class Mine(Pretrained, nn.Module):
        layouts = (Layout("Mine", "my_model"),)

        def __init__(self, config: Config):
            super().__init__()
            self.config, self.layer = config, nn.Linear(config.width, 2)
            self.register_buffer("seen", torch.zeros(3))
            self.register_buffer("ramp", torch.arange(config.width) * config.rate, persistent=False)

    model = Mine(Config(4, 0.25))
    model.seen += 7
    model.save_pretrained(tmp_path)
    back = Mine.from_pretrained(tmp_path)
    assert equal(back, model) and back.config == model.config
    assert torch.equal(back.ramp, torch.tensor([0, 0.25, 0.5, 0.75]))
