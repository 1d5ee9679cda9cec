"Captioners against `transformers` with the same weights, the bare LSTM, and loops; scenes and their grammar by hand and by brute force."

import itertools
import json

import pytest
import test_invariants
import torch
import torch.nn.functional as F
import transformers
from messages import says
from torch import nn
from torch.testing import assert_close

from annotated_nlp import decoding
from annotated_nlp.attention import attention_maps, dot_product_attention
from annotated_nlp.captioning import Captioner, CaptionerConfig, FeatureMap, ShowAndTell
from annotated_nlp.corpora import scenes
from annotated_nlp.gpt import GPTConfig
from annotated_nlp.hub.checkpoints import layouts_of
from annotated_nlp.vit import ViT, ViTConfig
from parity import close
from twins import as_saved

unchecked = test_invariants.unchecked  # as a user has the package
VISION = dict(hidden_size=32, num_attention_heads=4, num_hidden_layers=2, intermediate_size=48, image_size=12, patch_size=4)
WORDS = dict(vocab_size=40, n_positions=24, n_embd=32, n_head=4, n_layer=2, add_cross_attention=True, is_decoder=True)
SPECIAL = dict(decoder_start_token_id=2, eos_token_id=3, pad_token_id=0)
NO_DROPOUT = dict(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
ODD = {
    "plain": ({}, {}),
    "widths that differ": (dict(hidden_size=24), {}),
    "one layer against three": (dict(num_hidden_layers=1, num_channels=1, layer_norm_eps=1e-3), dict(n_layer=3, n_inner=50, activation_function="relu")),
    "one patch, heads of one": (dict(image_size=7, patch_size=7, hidden_size=6, num_attention_heads=6), dict(n_embd=6, n_head=6)),
}
EACH = pytest.mark.parametrize("odd", ODD)
TO = {torch.float32: 1e-5, torch.float64: 1e-13}


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def theirs_(odd="plain", **options):
    "From their own initialiser, with large weights and no bias at zero."
    vision, words = (dict(one, **other) for one, other in zip((VISION, WORDS | NO_DROPOUT), ODD[odd]))
    start = dict(initializer_range=0.3)
    parts = transformers.ViTConfig(**vision, **start), transformers.GPT2Config(**words, **start)
    config = transformers.VisionEncoderDecoderConfig.from_encoder_decoder_configs(*parts, **SPECIAL, **options)
    model = transformers.VisionEncoderDecoderModel(config).eval()
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.add_(0.1 * torch.randn_like(p) if p.ndim == 1 or "token" in name or "position" in name else 0)
    return model


def both(folder, odd="plain"):
    theirs = theirs_(odd)
    theirs.save_pretrained(folder)
    return Captioner.from_pretrained(folder), theirs


def seen(c, b=4, n=9):
    "Images, and captions of several lengths with their mask."
    images = torch.randn(b, c.encoder.num_channels, c.encoder.image_size, c.encoder.image_size)
    mask = torch.arange(n) < torch.tensor([n, 4, 1, 7])[:, None]
    return images, torch.randint(4, 40, (b, n)).where(mask, 0), mask


def small(**changes):
    encoder = ViTConfig(image_size=12, patch_size=4, n_channels=1, d_model=24, n_heads=4, d_ff=48, n_layers=2)
    decoder = GPTConfig(vocab_size=40, max_len=16, d_model=32, n_heads=4, n_layers=2, dropout=0.0)
    model = Captioner(CaptionerConfig(**dict(encoder=encoder, decoder=decoder, bos_id=2, eos_id=3, pad_id=0) | changes)).eval()
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(0.3 * torch.randn_like(p) if p.ndim > 1 else p + 0.1 * torch.randn_like(p))
    return model


def teller(attention=None, **settings):
    return ShowAndTell(FeatureMap(1, 12, 4, 16, width=8), 40, 16, attention, **settings).eval()


# against `transformers` -----------------------------------------------------------------------------------------------


@EACH
@pytest.mark.parametrize("dtype", TO, ids=str)
def test_outputs_losses_and_gradients(odd, dtype, tmp_path):
    ours, theirs = (model.to(dtype) for model in both(tmp_path / "a", odd))
    images, ids, mask = seen(theirs.config)
    images = images.to(dtype)
    labels = ids[:, 1:].masked_fill(~mask[:, 1:], -100)
    found, wanted = ours(images, ids[:, :-1]), theirs(images, decoder_input_ids=ids[:, :-1])
    close(found[mask[:, :-1]], wanted.logits[mask[:, :-1]], TO[dtype])
    losses = [F.cross_entropy(logits.flatten(0, 1), labels.flatten()) for logits in (found, wanted.logits)]
    close(*losses, TO[dtype])
    wanted = torch.autograd.grad(100 * losses[1], list(theirs.parameters()), allow_unused=True)
    wanted = as_saved(theirs, wanted, tmp_path / "b")
    gradients = torch.autograd.grad(100 * losses[0], list(ours.parameters()))
    gradients = layouts_of(Captioner)[0].rename({name: x for (name, _), x in zip(ours.named_parameters(), gradients, strict=True)}, ours.config)
    for name, gradient in gradients.items():
        scale = max(1, wanted[name].abs().max().item())
        assert_close(gradient, wanted[name], atol=3 * TO[dtype] * scale, rtol=0, msg=lambda text, name=name: f"{name}: {text}")
        assert gradient.abs().max() > 0 or "key.bias" in name, name
    assert wanted.keys() - gradients.keys() == {"encoder.pooler.dense.weight", "encoder.pooler.dense.bias"}


@EACH
@torch.no_grad()
def test_states_of_all_layers(odd, tmp_path):
    ours, theirs = both(tmp_path, odd)
    images, ids, mask = seen(theirs.config)
    wanted = theirs(images, decoder_input_ids=ids, output_hidden_states=True)
    read, written = ours.states(images, ids, all_layers=True)
    last = theirs.encoder(images).last_hidden_state
    for x, y in zip(read, (*wanted.encoder_hidden_states[:-1], last), strict=True):
        close(x, y)
    for x, y in zip(written, wanted.decoder_hidden_states, strict=True):
        close(x[mask], y[mask])
    close(ours.encode(images), ours.project(last))


@EACH
@torch.no_grad()
def test_attention_weights(odd, tmp_path):
    "Which patch is read while which word is written."
    ours, theirs = both(tmp_path, odd)
    theirs.set_attn_implementation("eager")
    images, ids, mask = seen(theirs.config)
    with attention_maps(ours.decoder) as maps:
        ours(images, ids)
    wanted = theirs(images, decoder_input_ids=ids, output_attentions=True).cross_attentions
    crossed = [weights for name, weights in maps.items() if "cross" in name]
    for x, y in zip(crossed, wanted, strict=True):
        close(x.movedim(2, 1)[mask], y.movedim(2, 1)[mask])


@torch.no_grad()
@pytest.mark.parametrize("rules", [{}, dict(num_beams=3, early_stopping="never", length_penalty=0.0)], ids=["greedy", "beam"])
def test_captions(rules, tmp_path):
    "Token by token from the cache, as theirs."
    ours, theirs = both(tmp_path)
    images = seen(theirs.config)[0]
    for stop in (3, 17):
        wanted = theirs.generate(images, max_new_tokens=12, do_sample=False, decoder_start_token_id=2, eos_token_id=stop, pad_token_id=0, **rules)[:, 1:]
        found = ours.generate(images, 12, stop_id=stop, beam=rules.get("num_beams", 1))
        assert torch.equal(found, wanted[:, : found.shape[1]]) and (wanted[:, found.shape[1] :] == 0).all()


@EACH
@torch.no_grad()
def test_there_and_back(odd, tmp_path):
    "What is saved here has the same bits in `transformers`; only the pooler, which nothing reads, is missing."
    ours, theirs = both(tmp_path / "a", odd)
    ours.save_pretrained(tmp_path / "b")
    again, info = transformers.VisionEncoderDecoderModel.from_pretrained(tmp_path / "b", output_loading_info=True)
    assert {*info["missing_keys"]} == {"encoder.pooler.dense.weight", "encoder.pooler.dense.bias"}
    assert not info["unexpected_keys"] and not info["mismatched_keys"]
    state = again.state_dict()
    assert all(torch.equal(state[name], x) for name, x in theirs.state_dict().items() if "pooler" not in name)
    images, ids, _ = seen(theirs.config)
    close(again.eval()(images, decoder_input_ids=ids).logits, theirs(images, decoder_input_ids=ids).logits, 1e-6)
    for name, value in SPECIAL.items():
        assert getattr(again.config, name) == value
    back = Captioner.from_pretrained(tmp_path / "b")
    assert back.config == ours.config
    assert all(torch.equal(p, q) for p, q in zip(back.parameters(), ours.parameters(), strict=True))


@torch.no_grad()
def test_made_here(tmp_path):
    "Never theirs, in shards."
    model = small()
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    theirs = transformers.VisionEncoderDecoderModel.from_pretrained(tmp_path).eval()
    images, ids = torch.randn(3, 1, 12, 12), torch.randint(40, (3, 7))
    close(model(images, ids), theirs(images, decoder_input_ids=ids).logits)
    again = Captioner.from_pretrained(tmp_path, dropout=0.25)
    assert again.config.encoder.dropout == again.config.decoder.dropout == 0.25
    assert Captioner.from_pretrained(tmp_path, eos_id=5).config.eos_id == 5


@pytest.mark.parametrize("part, option, value", [
    ("encoder", "qkv_bias", False), ("encoder", "hidden_act", "mish"), ("encoder", "model_type", "deit"),
    ("decoder", "add_cross_attention", False), ("decoder", "model_type", "bert"), ("decoder", "scale_attn_by_inverse_layer_idx", True),
    (None, "is_encoder_decoder", False), (None, "decoder_start_token_id", "two"), (None, "decoder", None),
])
def test_what_our_model_cannot_do(part, option, value, tmp_path, unchecked):
    small().save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (config if part is None else config[part])[option] = value
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=option):
        Captioner.from_pretrained(tmp_path)


def test_what_their_files_cannot_say(tmp_path, unchecked):
    changed = GPTConfig(vocab_size=40, max_len=16, d_model=32, n_heads=4, n_layers=1, prefix_lm=True)
    with pytest.raises(ValueError, match="prefix_lm=True"):
        small(decoder=changed).save_pretrained(tmp_path / "new")


@pytest.mark.parametrize("part, option", [("encoder", "layer_norm_eps"), ("decoder", "layer_norm_epsilon"), (None, "decoder_start_token_id")])
def test_a_changed_setting_is_damage(part, option, tmp_path, unchecked):
    "The fingerprint covers the settings of the whole and of both parts."
    small().save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (config if part is None else config[part])[option] = 7 if part is None else 0.5
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="damaged"):
        Captioner.from_pretrained(tmp_path)


# the parts ------------------------------------------------------------------------------------------------------------


@torch.no_grad()
def test_the_encoder_is_the_vit():
    "With a ViT's weights it gives the ViT's states."
    model = small()
    vit = ViT(model.config.encoder).eval()
    vit.load_state_dict(model.encoder.state_dict(), strict=False)
    images = torch.randn(2, 1, 12, 12)
    assert torch.equal(model.states(images, torch.tensor([[2], [2]]))[0], vit.states(images))


@torch.no_grad()
def test_images_of_another_size():
    "Places are interpolated, as the ViT does it; the decoder reads more vectors."
    model = small()
    assert model.encode(torch.randn(2, 1, 16, 20)).shape == (2, 1 + 4 * 5, 32)
    assert model.generate(torch.randn(2, 1, 16, 20), 5).shape[0] == 2


@torch.no_grad()
def test_map_sees_its_window_and_knows_where():
    "A change of a pixel reaches no vector further than the convolutions do, and equal windows differ by their place."
    net = FeatureMap(1, 40, 4, 16, width=4).eval()
    images = torch.zeros(1, 1, 40, 40)
    before, images = net(images), images.clone()
    images[0, 0, 17, 17] = 1
    changed = (net(images) != before).any(-1)[0].reshape(10, 10).nonzero()
    assert changed.min() >= 2 and changed.max() <= 6 and (changed == 4).all(1).any()
    assert len(before[0, 44:46].unique(dim=0)) == 2
    assert net(torch.zeros(2, 1, 40, 40)).shape == (2, 100, 16)


@torch.no_grad()
@pytest.mark.parametrize("attention", [None, dot_product_attention], ids=["one vector", "attention"])
def test_lstm_by_hand(attention):
    "PyTorch's cell from word to word."
    model = teller(attention)
    images, ids = torch.randn(3, 1, 12, 12), torch.randint(40, (3, 6))
    memory = model.encoder(images)
    h, c = model.bridge(memory.mean(1)).tanh().chunk(2, -1)
    cell = nn.LSTMCell(16, 16)
    cell.load_state_dict({name.removesuffix("_l0"): p for name, p in model.decoder.state_dict().items()})
    for t in range(6):
        h, c = cell(model.tgt_embedding(ids[:, t]), (h, c))
        read = [((memory @ h[:, :, None]).softmax(1) * memory).sum(1)] if attention else []
        assert_close(model(images, ids)[:, t], model.head(torch.cat([*read, h], 1)), atol=1e-5, rtol=0)


@pytest.mark.parametrize("make", [small, teller, lambda: teller(dot_product_attention)], ids=["transformer", "one vector", "attention"])
def test_generation_is_one_convention(make):
    "Greedy and beam are those of `decoding`; a row that has ended is filled with padding; sampling can be repeated."
    model, images = make(), torch.randn(4, 1, 12, 12)
    with torch.no_grad():
        rules = dict(max_new_tokens=8, stop_id=9, pad_id=0)
        first = torch.full((4,), 2)
        wanted = decoding.greedy(model.step, model.start(images), first, **rules).ids
        assert torch.equal(model.generate(images, 8, stop_id=9), wanted)
        found = decoding.beam_search(model.step, model.start(images), first, beam=3, **rules)
        assert torch.equal(model.generate(images, 8, stop_id=9, beam=3), found.ids[:, 0, : found.lengths[:, 0].max()])
        drawn = [model.generate(images, 8, 1.0, top_k=5, generator=torch.Generator().manual_seed(1)) for _ in range(2)]
        assert torch.equal(*drawn)
    stopped = model.generate(images, 8, stop_id=int(wanted[0, 0]))
    assert stopped[0, 0] == wanted[0, 0] and (stopped[0, 1:] == 0).all()


def test_refusals(unchecked):
    model, images = small(), torch.randn(2, 1, 12, 12)
    ids = torch.tensor([[2, 5], [2, 6]])
    with pytest.raises(ValueError, match=says("mask", "no padding", "drop it")):
        model.generate(images, 4, mask=torch.ones(2, 9, dtype=torch.bool))
    with pytest.raises(ValueError, match=says("ids", "outside the vocabulary of 40")):
        model(images, ids + 40)
    with pytest.raises(ValueError, match=says("ids", "(2, n)")):
        model(images, ids[:1])
    with pytest.raises(ValueError, match=says("n_channels=1")):
        model(torch.randn(2, 3, 12, 12), ids)
    with pytest.raises(ValueError, match=says("17", "16")):
        model.generate(images, 17)
    with pytest.raises(ValueError, match=says("bos_id=40")):
        small(bos_id=40)
    with pytest.raises(TypeError, match="encoder is dict, give ViTConfig"):
        CaptionerConfig(encoder={})
    with pytest.raises(ValueError, match=says("eos_id=40")):
        teller(eos_id=40)
    with pytest.raises(ValueError, match=says("image_size=13")):
        FeatureMap(1, 13, 4, 16)
    with pytest.raises(ValueError, match=says("window=5")):
        FeatureMap(1, 15, 5, 16)
    with pytest.raises(ValueError, match=says("mask", "drop it")):
        teller().generate(images, 4, mask=torch.ones(2, 9, dtype=torch.bool))


# scenes and what is said of them --------------------------------------------------------------------------------------

SCENE = scenes.Scene(scenes.Group("eight", 1), "left", scenes.Group("six", 2))


def test_grammar_by_hand():
    wanted = {f"an eight {word} two sixes" for word in ("left of", "to the left of")} | {f"two sixes {word} an eight" for word in ("right of", "to the right of")}
    assert sorted(scenes.captions(SCENE)) == sorted(wanted)
    assert scenes.captions(scenes.Scene(scenes.Group("dress", 3))) == ["three dresses", "three frocks"]
    assert scenes.phrases(scenes.Group("boot", 1)) == ["a boot", "a shoe"] and scenes.phrases(scenes.Group("one", 1)) == ["a one"]


def test_no_caption_has_two_meanings():
    whole = [scene for part in ("alone", "together", "apart") for scene in scenes.meanings(part)]
    said = [text for scene in whole for text in scenes.captions(scene)]
    assert len(said) == len({*said}) and len(whole) == len({*whole})


def test_what_is_kept_apart():
    pairs = lambda part: {frozenset((scene.first.kind, scene.second.kind)) for scene in scenes.meanings(part)}
    assert not pairs("apart") & pairs("together")
    assert pairs("apart") | pairs("together") == {frozenset(two) for two in itertools.combinations(scenes.KINDS, 2)}
    assert {kind for two in pairs("apart") for kind in two} == {*scenes.KINDS}
    with pytest.raises(ValueError, match=says("part='else'")):
        scenes.meanings("else")


def test_things_lie_as_the_scene_says():
    "Every kind is a full square of its own grey, so that groups can be found again."
    pool = {kind: torch.full((2, 8, 8), (i + 1) / 20) for i, kind in enumerate(scenes.KINDS)}
    for seed in range(40):
        images, found = scenes.drawn({"together": 1, "apart": 1, "alone": 1}, pool, 6, seed)
        for image, scene in zip(images, found):
            middle = []
            for group in filter(None, (scene.first, scene.second)):
                at = (image[0] == pool[group.kind][0, 0, 0]).nonzero().float()
                assert len(at) == 64 * group.n
                middle.append((at.amin(0) + at.amax(0)) / 2)
            if scene.relation:
                down, right = middle[1] - middle[0]
                along, across = (down, right) if scene.relation == "above" else (right, down)
                assert along >= 8 and abs(across) <= 7 < along + 8 and along > abs(across)


def test_drawn_again_and_restyled():
    pool = scenes.things("valid")
    assert {*pool} == {*scenes.KINDS} and all(x.shape[1:] == (8, 8) and len(x) > 4 for x in pool.values())
    one, two = (scenes.drawn("apart", pool, 5, seed=3) for _ in range(2))
    assert torch.equal(one.images, two.images) and one.scenes == two.scenes
    assert all(scenes.apart(scene.first.kind, scene.second.kind) for scene in one.scenes)
    assert_close(scenes.restyled(one.images, light=0.5), one.images / 2)
    assert (scenes.restyled(one.images, degrees=20) - one.images).abs().max() > 0.1
    with pytest.raises(ValueError, match=says("light=2")):
        scenes.restyled(one.images, light=2)


def test_words():
    texts = [text for scene in scenes.meanings("apart") for text in scenes.captions(scene)]
    ids = scenes.caption_ids(texts)
    assert scenes.decode(ids) == texts and not (ids == scenes.UNK).any()
    assert scenes.decode(scenes.caption_ids(["a cat"])) == ["a"] and scenes.caption_ids(["a cat"])[0, 2] == scenes.UNK
