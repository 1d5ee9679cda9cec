"ViT and DeiT against `transformers` with the same weights (and timm where it is installed), patches by convolution and by loop, distillation and roll-out by hand."

import itertools
import math
from functools import partial
from pathlib import Path

import messages
import nbformat
import numpy as np
import pytest
import test_invariants
from parity import GPU, close
from test_loaders import png
from twins import PRECISIONS, ROWS, images_, parameters
import torch
import torch.nn.functional as F
import transformers
from annotated_nlp import vit
from annotated_nlp.attention import attention_maps
from annotated_nlp.parts.pictures import ConvNet, mixup, random_affine
from annotated_nlp.vit import DeiT, DeiTConfig, ViT, ViTConfig, attention_rollout
from annotated_nlp.vit import hard_distillation, interpolate_places, soft_distillation
from annotated_nlp.vit import to_patches
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.testing import assert_close

unchecked = test_invariants.unchecked  # as a user has the package
SMALL_DIGITS = ViTConfig(image_size=8, patch_size=2, n_channels=1, n_classes=10, d_model=64, n_heads=4, d_ff=128, n_layers=2)
PAGE = Path(__file__).resolve().parents[2] / "nbs" / "16_vit.ipynb"
SMALL = ROWS["ViT"].small
MODELS = pytest.mark.parametrize("kind", [ViT, DeiT], ids=lambda kind: kind.__name__)


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def small(model=ViT, loud=0.3, **changes):
    return ROWS[model.__name__].alone(loud, **changes)


# Values, losses, gradients


def test_a_trunk_for_another_task(tmp_path):
    "Their trunk alone, pooler and all, under a new head; and the head of a classifier replaced."
    theirs = transformers.ViTModel(transformers.ViTConfig(**ROWS["ViT"].odd["plain"])).eval()
    theirs.save_pretrained(tmp_path / "trunk")
    model = ViT.from_pretrained(tmp_path / "trunk", fresh="head", n_classes=9)
    images = images_(theirs.config)
    close(model.states(images), theirs(images).last_hidden_state)
    assert model(images).shape == (4, 9)
    small().save_pretrained(tmp_path / "classifier")
    assert ViT.from_pretrained(tmp_path / "classifier", fresh="head", n_classes=7)(images).shape == (4, 7)
    with pytest.raises(ValueError, match="fresh"):
        ViT.from_pretrained(tmp_path / "trunk")


def timms(kind):
    "A model of timm's, small, with random weights, and ours with those."
    timm = pytest.importorskip("timm")
    name = "deit_tiny_distilled_patch16_224" if kind is DeiT else "vit_tiny_patch16_224"
    theirs = timm.create_model(name, img_size=12, patch_size=4, embed_dim=32, depth=2, num_heads=4, num_classes=5, mlp_ratio=1.5).eval()
    with torch.no_grad():
        for p in theirs.parameters():
            p.copy_(0.3 * torch.randn_like(p))
    weights, ours = theirs.state_dict(), small(kind)
    prefixes = {"norm1": "attention.norm", "attn.qkv": "attention.layer.query_key_value", "attn.proj": "attention.layer.out", "norm2": "feed_forward.norm", "mlp.fc1": "feed_forward.layer.up", "mlp.fc2": "feed_forward.layer.down"}
    state = {"embedding.places": weights["pos_embed"], "embedding.tokens": torch.cat([weights[x] for x in ("cls_token", "dist_token") if x in weights])}
    for end in ("weight", "bias"):
        state |= {f"stack.blocks.{i}.{ours_}.{end}": weights[f"blocks.{i}.{their}.{end}"] for i in range(2) for their, ours_ in prefixes.items()}
        names = {"embedding.patches": "patch_embed.proj", "stack.norm": "norm", "head": "head"} | ({"distillation_head": "head_dist"} if kind is DeiT else {})
        state |= {f"{ours_}.{end}": weights[f"{their}.{end}"] for ours_, their in names.items()}
    ours.load_state_dict(state)
    return ours, theirs


@MODELS
def test_timm(kind):
    ours, theirs = timms(kind)
    images = images_(ours.config)
    found, wanted = ours(images), theirs(images)
    close(found, wanted)
    found.square().mean().backward()
    wanted.square().mean().backward()
    close(ours.embedding.patches.weight.grad, theirs.patch_embed.proj.weight.grad)


@pytest.mark.parametrize("config,printed", [
    (ViTConfig.b16(), 86), (ViTConfig.l16(), 307), (ViTConfig.h14(), 632),  # Dosovitskiy et al. 2021, table 1
    (DeiTConfig.tiny(), 5), (DeiTConfig.small(), 22), (DeiTConfig.base(), 86),  # Touvron et al. 2021, table 1
], ids=["B/16", "L/16", "H/14", "DeiT-Ti", "DeiT-S", "DeiT-B"])
def test_sizes_as_printed(config, printed):
    "The paper's figure is ours, without a second token and head, to one per cent, or cut off to whole millions."
    count = parameters(lambda: ViT(config))
    assert abs(count / 1e6 / printed - 1) < 0.01 or int(count / 1e6) == printed
    assert (config.n_patches, config.d_model // config.n_heads) == (256 if config.patch_size == 14 else 196, 80 if config.patch_size == 14 else 64)


def test_settings_can_be_changed():
    for make in (ViTConfig.b16, ViTConfig.l16, ViTConfig.h14, DeiTConfig.tiny, DeiTConfig.small, DeiTConfig.base):
        config = make(image_size=112, n_classes=3, d_model=128, n_heads=2)
        assert (config.image_size, config.n_classes, config.d_model, config.n_heads) == (112, 3, 128, 2)


# Patches and places


@given(st.integers(1, 3), st.integers(1, 3), st.integers(1, 4), st.integers(1, 4), st.integers(1, 4))
@settings(max_examples=60)
def test_patches(b, channels, rows, columns, size):
    "By a loop over pixels, by `F.unfold`, and put together again."
    images = torch.randn(b, channels, rows * size, columns * size)
    found = to_patches(images, size)
    assert found.shape == (b, rows * columns, channels * size * size)
    for i, y, x in itertools.product(range(b), range(rows), range(columns)):
        one = [images[i, c, y * size + p, x * size + q] for c in range(channels) for p in range(size) for q in range(size)]
        assert found[i, y * columns + x].tolist() == [value.item() for value in one]
    assert torch.equal(found.mT, F.unfold(images, size, stride=size))
    assert torch.equal(F.fold(found.mT, images.shape[-2:], size, stride=size), images)


@PRECISIONS
@pytest.mark.parametrize("channels,size,sides", [(3, 4, (12, 12)), (1, 1, (3, 5)), (2, 7, (7, 14))])
def test_patches_are_a_convolution(channels, size, sides, dtype):
    "Values and all gradients of PyTorch's, with the patch as kernel and stride; the weight needs no reshaping."
    patches = vit.Patches(ViTConfig(**SMALL | dict(patch_size=size, image_size=size, n_channels=channels))).to(dtype)
    theirs = nn.Conv2d(channels, 32, size, stride=size, dtype=dtype)
    patches.load_state_dict(theirs.state_dict())
    images = torch.randn(3, channels, *sides, dtype=dtype, requires_grad=True)
    found, wanted = patches(images), theirs(images).flatten(2).mT
    close(found, wanted, ROWS["ViT"].tolerance(dtype))
    upstream = torch.randn_like(found)
    for one, other in zip(*(torch.autograd.grad(y, [images, *model.parameters()], upstream) for y, model in ((found, patches), (wanted, theirs)))):
        close(one, other, ROWS["ViT"].tolerance(dtype))


def test_what_the_blocks_read():
    "Equation 1, written out: tokens, patches times a matrix, places."
    for kind, t in ((ViT, 1), (DeiT, 2)):
        model = small(kind)
        e, images = model.embedding, images_(model.config)
        found = e(images)
        assert found.shape == (4, t + 9, 32)
        for i in range(t):
            close(found[:, i], (e.tokens[i, 0] + e.places[0, i]).expand(4, -1))
        matrix = e.patches.weight.flatten(1)
        close(found[:, t + 5], images[:, :, 4:8, 8:12].flatten(1) @ matrix.T + e.patches.bias + e.places[0, t + 5])


def test_places_between():
    "A grid stays itself, a constant constant; each feature alone; all by the cubic convolution of Keys 1981 with a = -3/4, written out."
    grid = torch.randn(1, 36, 5)
    close(interpolate_places(grid, 6, 6), grid, 1e-6)
    close(interpolate_places(torch.ones(1, 36, 2), 7, 11), torch.ones(1, 77, 2), 1e-6)

    def weight(t, a=-0.75):
        t = abs(t)
        return (a + 2) * t**3 - (a + 3) * t**2 + 1 if t <= 1 else a * (t**3 - 5 * t**2 + 8 * t - 4) if t < 2 else 0.0

    def matrix(old, new):
        rows = torch.zeros(new, old)
        for i in range(new):
            centre = (i + 0.5) * old / new - 0.5
            for j in range(math.floor(centre) - 1, math.floor(centre) + 3):
                rows[i, min(max(j, 0), old - 1)] += weight(centre - j)
        return rows

    wanted = torch.einsum("iy,jx,yxd->ijd", matrix(6, 9), matrix(6, 4), grid.reshape(6, 6, 5)).reshape(1, 36, 5)
    close(interpolate_places(grid, 9, 4), wanted)


def test_places_are_learnt_at_every_size():
    "The class token's place is left as it is; the others take part whatever the size of the images."
    model = small(DeiT)
    assert model.embedding.places_of(12, 12) is model.embedding.places
    assert torch.equal(model.embedding.places_of(8, 20)[:, :2], model.embedding.places[:, :2])
    model.heads(images_(model.config, 8, 20))[0].square().sum().backward()
    assert (model.embedding.places.grad.abs().amax(-1) > 0).all()


@MODELS
def test_order_is_known_by_places_alone(kind):
    "With all places alike, patches in another order give states in that order, and the same logits."
    model = small(kind)
    images, t = images_(model.config), model.n_tokens
    order = torch.randperm(9)
    squares = F.unfold(images, 4, stride=4)
    shuffled = F.fold(squares[..., order], (12, 12), 4, stride=4)
    assert (model(images) - model(shuffled)).abs().max() > 0.01
    nn.init.zeros_(model.embedding.places)
    close(model(shuffled), model(images).detach())
    close(model.states(shuffled)[:, t:], model.states(images)[:, t:][:, order].detach())


def test_deit_in_training_and_at_evaluation():
    model = small(DeiT)
    images = images_(model.config)
    own, other = model.heads(images)
    assert torch.equal(model(images), (own + other) / 2) and not torch.allclose(own, other)
    found = model.train()(images)
    assert isinstance(found, tuple) and torch.equal(found[0], own) and torch.equal(found[1], other)
    assert isinstance(DeiT(ViTConfig(**SMALL)).eval()(images), torch.Tensor)


# Distillation


@pytest.mark.parametrize("temperature,weight", [(3.0, 0.1), (1.0, 1.0), (0.5, 0.0), (20.0, 0.5)])
def test_soft_distillation(temperature, weight):
    "Equation 2, term by term in Python's numbers; no gradient to the teacher; zero where student and teacher agree."
    own, other, teacher = (torch.randn(6, 5, dtype=torch.float64, requires_grad=True) for _ in range(3))
    labels = torch.randint(5, (6,))
    found = soft_distillation((own, other), labels, teacher, temperature, weight)
    wanted = 0.0
    for a, b, t, y in zip(own.tolist(), other.tolist(), teacher.tolist(), labels.tolist()):
        p, q = ([math.exp(z / temperature) / sum(math.exp(w / temperature) for w in row) for z in row] for row in (t, b))
        wanted += (1 - weight) * (math.log(sum(math.exp(z) for z in a)) - a[y]) / 6
        wanted += weight * temperature**2 * sum(x * math.log(x / z) for x, z in zip(p, q)) / 6
    assert_close(found.item(), wanted)
    gradients = torch.autograd.grad(found, (own, other, teacher), allow_unused=True)
    assert gradients[2] is None
    close(gradients[1], weight * temperature * ((other / temperature).softmax(-1) - (teacher / temperature).softmax(-1)).detach() / 6, 1e-12) if weight else None
    assert soft_distillation((own, teacher), labels, teacher, temperature, 1.0).abs() < 1e-12


def test_hard_distillation():
    "Equation 3: half a cross-entropy with each."
    own, other, teacher = torch.randn(3, 6, 5, dtype=torch.float64).unbind()
    labels, said = torch.randint(5, (6,)), teacher.argmax(-1)
    found = hard_distillation((own, other), labels, teacher)
    wanted = -(own.log_softmax(-1)[range(6), labels] + other.log_softmax(-1)[range(6), said]).mean() / 2
    assert_close(found, wanted)
    spread = F.one_hot(labels, 5).double()
    assert_close(hard_distillation((own, other), spread, teacher), wanted)
    for lose in (soft_distillation, hard_distillation):
        for alike in (spread, spread.bfloat16(), labels.int()):
            assert_close(lose((own, other), alike, teacher), lose((own, other), labels, teacher))


# Augmentation


def fixed(monkeypatch, *values):
    "Random numbers that are known: each draw gives the next of `values` everywhere."
    left = iter(values)
    monkeypatch.setattr(torch, "rand", lambda *shape, **kwargs: torch.full(shape, next(left)))


@pytest.mark.parametrize("turns", [-1, 1])
def test_a_quarter_turn(turns, monkeypatch):
    images = torch.rand(2, 3, 8, 8)
    fixed(monkeypatch, (turns + 1) / 2, 0.5, 0.5, 0.5)
    close(random_affine(images, degrees=90), torch.rot90(images, turns, (2, 3)), 1e-5)


@pytest.mark.parametrize("sign", [-1, 1])
def test_a_shift(sign, monkeypatch):
    "By a quarter of an image of eight: two pixels, both ways, zeros coming in."
    images = torch.rand(2, 3, 8, 8)
    fixed(monkeypatch, 0.5, 0.5, (sign + 1) / 2, (sign + 1) / 2)
    wanted = F.pad(images, (2, 2, 2, 2))[..., 2 + 2 * sign :, 2 + 2 * sign :][..., :8, :8]
    close(random_affine(images, shift=0.25), wanted, 1e-5)


def test_a_scale(monkeypatch):
    "To one half: the mean of each square of four pixels, in the middle of nothing."
    images = torch.rand(2, 1, 8, 8)
    fixed(monkeypatch, 0.5, 0.0, 0.5, 0.5)
    close(random_affine(images, scale=0.5), F.pad(F.avg_pool2d(images, 2), (2, 2, 2, 2)), 1e-5)


def test_affine_at_random():
    "Nothing asked, nothing changed; each image its own; repeated by a generator; the global one untouched."
    images = torch.rand(1, 1, 8, 8).expand(6, 1, 8, 8)
    close(random_affine(images), images, 1e-5)
    draw = lambda seed: random_affine(images, degrees=20, shift=0.1, scale=0.1, generator=torch.Generator().manual_seed(seed))
    state = torch.get_rng_state()
    assert torch.equal(draw(1), draw(1)) and not torch.equal(draw(1), draw(2))
    assert torch.equal(torch.get_rng_state(), state)
    assert all(not torch.equal(a, b) for a, b in itertools.combinations(draw(1), 2))
    assert random_affine(torch.rand(2, 3, 4, 6), degrees=10).shape == (2, 3, 4, 6)
    assert random_affine(images.double(), degrees=10).dtype == torch.float64


@pytest.mark.parametrize("cut", [False, True], ids=["mixup", "CutMix"])
def test_mixup(cut):
    "Images whose every pixel is their class: what is seen is what the targets say."
    labels = torch.arange(40) % 8
    images = F.one_hot(labels, 8).float()[:, :, None, None].expand(40, 8, 6, 9)
    found = mixup(images, labels, 8, cut=cut, generator=torch.Generator().manual_seed(3))
    assert_close(found.targets, found.images.mean((2, 3)))
    assert_close(found.targets.sum(-1), torch.ones(40))
    assert (found.targets > 0.001).sum(-1).max() == 2 and 0.2 < found.targets.max(-1).values.mean() < 0.95
    if cut:
        assert set(found.images.unique().tolist()) == {0.0, 1.0}
        pasted = [image for image in found.images if image.mean((1, 2)).max() < 1]
        assert len(pasted) > 10
        for image in pasted:  # a rectangle of one of the two
            inside = [channel for channel in image if 0 < channel.mean() < 1]
            assert any(torch.equal(x, x.any(0)[None] * x.any(1)[:, None]) for x in inside)
    again = mixup(images, labels, 8, cut=cut, generator=torch.Generator().manual_seed(3))
    assert torch.equal(found.images, again.images) and torch.equal(found.targets, again.targets)


@pytest.mark.parametrize("cut", [False, True], ids=["mixup", "CutMix"])
def test_shares_are_even(cut):
    "Uniform for mixup; for CutMix what is left of the rectangle's area after the edges have cut it: more of the first."
    images = torch.arange(4000.0)[:, None, None, None].expand(4000, 1, 16, 16)
    found = mixup(images, torch.arange(4000), 4000, cut=cut, generator=torch.Generator().manual_seed(1))
    shares = found.targets[range(4000), range(4000)]
    assert abs(shares.mean().item() - 0.5) < 0.02 if not cut else 0.6 < shares.mean() < 0.75
    if not cut:
        assert ((shares.sort().values - torch.linspace(0, 1, 4000)).abs() < 0.04).all()


# Roll-out


def test_rollout_by_all_ways():
    "The sum over all ways through the layers of the product of their weights, counted one by one."
    maps = [torch.rand(2, 3, 4, 4).softmax(-1) for _ in range(3)]
    mixed = [(m.mean(1) + torch.eye(4)) / 2 for m in maps]
    found = attention_rollout(maps)
    for b, n, m in itertools.product(range(2), range(4), range(4)):
        ways = itertools.product(range(4), repeat=2)
        assert_close(found[b, n, m], sum(mixed[2][b, n, i] * mixed[1][b, i, j] * mixed[0][b, j, m] for i, j in ways))
    assert_close(found.sum(-1), torch.ones(2, 4))


def test_rollout_of_a_model():
    "Of an untrained one each patch's share is about the same; the maps are the layers' own."
    model = small(ViT, loud=0.001)
    with attention_maps(model) as maps:
        model(images_(model.config))
    found = attention_rollout(list(maps.values()))
    assert torch.equal(attention_rollout(maps), found)  # as attention_maps gives them
    assert found.shape == (4, 10, 10)
    assert_close(found[:, 0, 1:], torch.full((4, 9), (1 - 0.25 * (1 + 2 / 10 + 1 / 10)) / 9), atol=0.02, rtol=0)


# The convolutional net


@pytest.mark.parametrize("sides", [(8, 8), (6, 10), (2, 2)])
def test_convolutional_net(sides):
    model = ConvNet(3, 7, width=4)
    assert model(torch.randn(5, 3, *sides)).shape == (5, 7)
    wanted = 9 * (3 * 4 + 4 * 4 + 4 * 8 + 8 * 8) + 3 * (4 + 4 + 8 + 8) + 8 * 7 + 7
    assert sum(p.numel() for p in model.parameters()) == wanted
    moved = torch.zeros(2, 3, 40, 40)
    moved[0, :, 12:14, 13:16] = moved[1, :, 16:18, 19:22] = 1
    close(model(moved)[0], model(moved)[1].detach(), 1e-4)


# What a hostile user tries

says = partial(messages.says, or_else="resize|pass")


BAD_SETTINGS = [
    *((dict([(name, value)]), [f"{name}={value}"]) for name in ("image_size", "patch_size", "n_channels", "n_classes", "n_layers", "d_model", "n_heads", "d_ff") for value in (0, -1)),
    (dict(image_size=14), ["image_size=14", "patch_size=4"]),
    (dict(patch_size=16), ["image_size=12", "patch_size=16"]),
    (dict(d_model=30), ["d_model=30", "n_heads=4"]),
    (dict(dropout=1.0), ["dropout=1.0"]),
    (dict(activation="quick_gelu"), ["activation='quick_gelu'"]),
]
test_bad_settings, test_bad_settings_of_deit = (messages.refused(BAD_SETTINGS, partial(lambda kind, changes: small(kind, **changes), kind), or_else="resize|pass", errors=ValueError) for kind in (ViT, DeiT))


GOOD = torch.rand(2, 3, 12, 12)
LOGITS, ANSWERS = torch.rand(2, 5), torch.tensor([0, 1])


@pytest.mark.parametrize("images,words", [
    (GOOD[..., :10], ["images", "(2, 3, 12, 10)", "4"]),
    (GOOD[:, :, :11], ["images", "(2, 3, 11, 12)", "4"]),
    (GOOD[:, :, :0], ["images", "(2, 3, 0, 12)", "no length below 1"]),
    (GOOD[:, :1], ["images", "(2, 1, 12, 12)", "n_channels=3"]),
    (GOOD.movedim(1, -1), ["images", "(2, 12, 12, 3)", "n_channels=3"]),
    (GOOD[0], ["images", "(3, 12, 12)"]),
    (GOOD[None], ["images", "(1, 2, 3, 12, 12)"]),
    (GOOD[:0], ["images", "(0, 3, 12, 12)", "no length below 1"]),
    ((255 * GOOD).byte(), ["images", "uint8", "/ 255"]),
    (GOOD > 0.5, ["images", "bool"]),
    (GOOD.long(), ["images", "int64"]),
    (GOOD.double(), ["images", "float64", "float32"]),
    (GOOD.bfloat16(), ["images", "bfloat16", "float32"]),
], ids=lambda value: " ".join(value) if isinstance(value, list) else "")
@MODELS
def test_bad_images(kind, images, words, unchecked):
    model = small(kind)
    for call in (model, model.states):
        with pytest.raises(ValueError, match=says(*words)):
            call(images)


def test_autocast():
    "There the types may differ."
    model = small().bfloat16()
    with torch.autocast("cpu", torch.bfloat16):
        assert model(GOOD).dtype == torch.bfloat16
        assert small()(GOOD).isfinite().all()


test_bad_calls = messages.refused([
    (lambda: soft_distillation((GOOD[:, 0, 0],) * 2, torch.tensor([0, 1]), GOOD[:, 0, 0], temperature=0.0), ["temperature=0.0"]),
    (lambda: soft_distillation((GOOD[:, 0, 0],) * 2, torch.tensor([0, 1]), GOOD[:, 0, 0], weight=1.5), ["weight=1.5"]),
    (lambda: random_affine(GOOD, scale=1.0), ["scale=1.0"]),
    (lambda: random_affine(GOOD, scale=-0.1), ["scale=-0.1"]),
    (lambda: attention_rollout([]), ["maps"]),
    (lambda: interpolate_places(torch.zeros(1, 10, 3), 4, 4), ["10", "square"]),
    (lambda: interpolate_places(torch.zeros(1, 9, 3), 0, 4), ["height=0"]),
    (lambda: to_patches(GOOD, 5), ["images", "(2, 3, 12, 12)", "5"]),
    *((lambda size=size: to_patches(GOOD, size), [f"size={size}"]) for size in (0, -2, 1.5)),
    (lambda: to_patches(GOOD[0], 2), ["images", "(3, 12, 12)"]),
    (lambda: interpolate_places(torch.zeros(1, 0, 3), 4, 4), ["places=0"]),
    *((lambda lose=lose: lose(LOGITS, ANSWERS, LOGITS), ["heads", "(b, c)"]) for lose in (soft_distillation, hard_distillation)),
    *((lambda lose=lose, heads=heads, teacher=teacher: lose(heads, ANSWERS, teacher), ["heads"])
      for lose in (soft_distillation, hard_distillation)
      for heads, teacher in (((LOGITS, LOGITS), LOGITS[:1]), ((LOGITS, LOGITS), LOGITS[:, :4]), ((LOGITS, LOGITS[:, :4]), LOGITS), ((LOGITS,), LOGITS), ((LOGITS[:0],) * 2, LOGITS[:0]))),
    (lambda: soft_distillation((LOGITS, LOGITS), ANSWERS, LOGITS, temperature=math.inf), ["temperature=inf"]),
    *((lambda lose=lose, labels=labels: lose((LOGITS, LOGITS), labels, LOGITS), ["labels", *words]) for lose in (soft_distillation, hard_distillation)
      for labels, *words in ((ANSWERS - 100, "classes", "0 to"), (ANSWERS + 100, "classes"), (ANSWERS[:1], "(1,)", "(2,)"), (ANSWERS.float(), "float32"), (ANSWERS.tolist(), "list"),
                             (torch.ones(LOGITS.shape).long(), "floats"), (LOGITS, "shares"), (torch.full_like(LOGITS, math.nan), "shares"), (torch.eye(2, LOGITS.shape[1]) * 2, "sum to 2", "shares"))),
    *((lambda change=change, images=images: change(images), ["images", str(tuple(images.shape))])
      for change in (random_affine, lambda images: mixup(images, ANSWERS, 3)) for images in (GOOD.byte(), GOOD[0], GOOD[:0])),
    (lambda: random_affine(GOOD, degrees=math.nan), ["degrees=nan"]),
    (lambda: random_affine(GOOD, shift=math.inf), ["shift=inf"]),
    (lambda: mixup(GOOD, ANSWERS, 1), ["labels", "1", "0"]),
    (lambda: mixup(GOOD, ANSWERS - 1, 3), ["labels", "-1", "2"]),
    (lambda: mixup(GOOD, ANSWERS[:1], 3), ["labels", "(1,)", "(2,)"]),
    (lambda: mixup(GOOD, ANSWERS.float(), 3), ["labels", "float32"]),
    (lambda: mixup(GOOD, torch.eye(2).long(), 2), ["labels", "(2, 2)"]),
    (lambda: mixup(GOOD, ANSWERS, 0), ["n_classes=0"]),
    *((lambda sizes=sizes: attention_rollout([torch.rand(size) for size in sizes]), ["maps", "(b, _, n, n)"])
      for sizes in ([(1, 2, 3, 4)], [(1, 3, 3)], [(1, 2, 3, 3), (1, 2, 4, 4)], [(1, 2, 3, 3), (1, 3, 3)])),
    *((lambda name=name: ConvNet(**dict(n_channels=1, n_classes=3, width=4) | {name: 0}), [f"{name}=0"]) for name in ("n_channels", "n_classes", "width")),
], or_else="resize|pass")


def test_one_is_not_the_other(tmp_path, unchecked):
    ROWS["DeiT"].model_of_theirs().save_pretrained(tmp_path / "deit")
    ROWS["ViT"].model_of_theirs().save_pretrained(tmp_path / "vit")
    with pytest.raises(ValueError, match="reads 'vit'"):
        ViT.from_pretrained(tmp_path / "deit")
    with pytest.raises(ValueError, match="reads 'deit'"):
        DeiT.from_pretrained(tmp_path / "vit")


# The chapter's recipe for photographs, on a small local file of CIFAR-10's layout


@pytest.fixture
def recipe(monkeypatch):
    "What the chapter's two cells define, behind its imports; the network can't be asked."
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    cells = [cell.source for cell in nbformat.read(PAGE, as_version=4).cells if cell.cell_type == "code"]
    names = vars(vit) | dict(device="cpu", small=SMALL_DIGITS)
    for part in ("The notebook's own imports", "def photographs(", "def learn_photographs("):
        (source,) = (source for source in cells if part in source)
        exec(source, names)
    return names


@pytest.fixture
def photographs(tmp_path, monkeypatch):
    "A folder with CIFAR-10's files, columns and types: 32 noisy pictures a split, the dark ones of class 3, the bright ones of class 8."
    import datasets

    datasets.disable_progress_bars()
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    noise, path = np.random.default_rng(0), tmp_path / "cifar10"
    (path / "plain_text").mkdir(parents=True)
    features = datasets.Features({"img": datasets.Image(), "label": datasets.ClassLabel(num_classes=10)})
    for split in ("train", "test"):
        rows = [{"img": png(noise.integers(20 * label, 20 * label + 60, (32, 32, 3), dtype=np.uint8)), "label": label} for label in 16 * (3, 8)]
        datasets.Dataset.from_list(rows, features=features).to_parquet(path / "plain_text" / f"{split}-00000-of-00001.parquet")
    return path


def test_recipe_prepares_photographs(recipe, photographs):
    images, labels = recipe["photographs"]("train", photographs)
    assert images.shape == (32, 3, 32, 32) and labels.tolist() == 16 * [3, 8]
    means, spreads = torch.tensor([0.4914, 0.4822, 0.4465]), torch.tensor([0.2470, 0.2435, 0.2616])  # as usual for CIFAR-10
    for label, found in zip((3, 8), (images[::2], images[1::2])):
        assert_close(found.mean((0, 2, 3)), ((20 * label + 29.5) / 255 - means) / spreads, atol=0.02, rtol=0)
    whole = [recipe["changed"](images, labels) for _ in range(40)]
    for changed, shares in whole:
        assert changed.shape == images.shape and shares.shape == (32, 10)
        assert_close(shares.sum(1), torch.ones(32))
        assert_close(shares.min(), torch.tensor(0.01))
        assert torch.stack([changed.mean((1, 2, 3)), shares[:, 8]]).corrcoef()[0, 1] > 0.7  # the brighter, the more of class 8
    plain = sum(bool((shares.amax(1) > 0.9).all()) for _, shares in whole)
    assert 8 < plain < 32  # half of the batches aren't mixed


@pytest.mark.parametrize("kind", [ViT, DeiT], ids=lambda kind: kind.__name__)
def test_recipe_learns_photographs(recipe, photographs, kind):
    "The page's own sizes and settings for a few updates: the loss falls below what a model that knows the two classes, but sees nothing, has."
    model, teacher = recipe["photograph_reader"](kind), None
    assert model.config.n_patches == 64 and model.embedding.places.shape == (1, 64 + kind.n_tokens, 192)
    learn = partial(recipe["learn_photographs"], path=photographs, size=16, precision="fp32")
    if kind is DeiT:
        teacher = ConvNet(3, 10, width=8)
        learn(teacher, epochs=40, warmup=2, lr=1e-2)
        assert recipe["right_photographs"](teacher, photographs) > 90
    images, labels = recipe["photographs"]("train", photographs)
    loss = lambda: F.cross_entropy(model.eval()(images), labels).item()
    before = loss()
    history = learn(model, teacher=teacher, epochs=8, warmup=1)
    assert len(history.loss) == 16 and model(images).shape == (32, 10)
    assert loss() < 0.4 < math.log(2) < 1 < before
    assert recipe["right_photographs"](model, photographs) > 90


@pytest.mark.gpu
@GPU
def test_augmentation_on_a_gpu():
    images = torch.rand(4, 3, 20, 20, device="cuda")
    assert random_affine(images, degrees=10).is_cuda and mixup(images, torch.zeros(4).long().cuda(), 3, cut=True).targets.is_cuda
