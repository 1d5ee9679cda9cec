"DeBERTa, CANINE and XLNet against `transformers` with the same weights, and against their papers' equations."

import json

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch.testing import assert_close

from parity import close, lengths
from twins import made_loud, same_gradients
from annotated_nlp.bert import BertForSequenceClassification
from annotated_nlp.parts.canine import Canine, CanineConfig, hashes
from annotated_nlp.parts.deberta import Deberta, DebertaConfig, DebertaForMaskedLM
from annotated_nlp.parts.deberta import DebertaForPreTraining
from annotated_nlp.parts.xlnet import XLNet, XLNetConfig


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def made(kind, options, std=0.3):
    "A model of theirs at evaluation; no bias stays at zero and no gain at one."
    theirs = kind(kind.config_class(initializer_range=std, **options)).eval()
    with torch.no_grad():
        for p in theirs.parameters():
            if p.ndim == 1:
                p.add_(0.1 * torch.randn_like(p))
    return theirs


def there_and_back(ours, theirs, folder, run, read):
    "What ours writes, theirs reads: the same outputs again, and the same options."
    ours.save_pretrained(folder)
    again, report = type(theirs).from_pretrained(folder, output_loading_info=True)
    assert not report["missing_keys"] and not report["mismatched_keys"], report
    close(run(ours), read(again.eval()))
    assert json.loads((folder / "config.json").read_text())["model_type"] == theirs.config.model_type


# DeBERTa

DEBERTA = dict(
    vocab_size=37, hidden_size=24, num_attention_heads=4, intermediate_size=40, num_hidden_layers=3, max_position_embeddings=16,
    relative_attention=True, position_biased_input=False, pos_att_type=["c2p", "p2c"], hidden_dropout_prob=0.0,
    attention_probs_dropout_prob=0.0, layer_norm_eps=1e-3, pad_token_id=0,
)  # fmt: skip
ODD = {
    "plain": {},
    "segments": dict(type_vocab_size=3, hidden_act="gelu_new"),
    "short distances": dict(max_relative_positions=4, num_attention_heads=2, pos_att_type=["p2c", "c2p"]),
    "narrow embedding": dict(embedding_size=10, hidden_act="relu", num_hidden_layers=1),
}


def deberta_batch(options):
    ids, mask = torch.randint(1, 37, (3, 13)), lengths(13, 5, 9)
    segments = torch.randint(options["type_vocab_size"], (3, 13)) if options.get("type_vocab_size") else None
    return ids, segments, mask


def deberta_read(theirs, ids, segments, mask):
    return theirs(ids, attention_mask=mask, token_type_ids=segments)[0][mask]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("odd", ODD)
def test_deberta_is_theirs(odd, dtype, tmp_path):
    "States, and files in both directions."
    options = DEBERTA | ODD[odd]
    theirs, batch = made(transformers.DebertaModel, options), deberta_batch(options)
    theirs.save_pretrained(tmp_path / "theirs")
    ours, theirs = Deberta.from_pretrained(tmp_path / "theirs", dtype=dtype), theirs.to(dtype)
    run = lambda model: model(*batch)[batch[2]]
    # their norm and their softmax's scale are in float32 whatever the model's precision
    close(run(ours), deberta_read(theirs, *batch))
    if dtype == torch.float32:
        there_and_back(ours, theirs, tmp_path / "ours", run, lambda model: deberta_read(model, *batch))


@pytest.mark.parametrize("legacy", [True, False])
@pytest.mark.parametrize("odd", ODD)
def test_deberta_fills_gaps_as_theirs(odd, legacy, tmp_path):
    "Logits, loss, every gradient, and files in both directions, under both names of the head."
    options = DEBERTA | ODD[odd] | dict(legacy=legacy)
    if not legacy and "embedding_size" in options:
        pytest.skip("their other head knows no narrow embedding")
    theirs, (ids, segments, mask) = made(transformers.DebertaForMaskedLM, options), deberta_batch(options)
    theirs.save_pretrained(tmp_path / "theirs")
    ours = DebertaForMaskedLM.from_pretrained(tmp_path / "theirs")
    labels = ids.masked_fill(~mask | (torch.rand(ids.shape) < 0.5), -100)
    wanted = theirs(ids, attention_mask=mask, token_type_ids=segments, labels=labels)
    logits = ours(ids, segments, mask)
    loss = F.cross_entropy(logits[labels >= 0], labels[labels >= 0])
    close(logits[mask], wanted.logits[mask])
    close(loss, wanted.loss)
    if legacy:  # the name that ours writes
        same_gradients(ours, theirs, (loss, wanted.loss), 1e-5, tmp_path / "gradients")
    run = lambda model: model(ids, segments, mask)[mask]
    there_and_back(ours, theirs, tmp_path / "ours", run, lambda model: deberta_read(model, ids, segments, mask))


@pytest.mark.parametrize("word", ["c2p|p2c", "p2c|c2p"])
def test_deberta_reads_the_authors_options(word, tmp_path):
    theirs = made(transformers.DebertaModel, DEBERTA)
    theirs.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | dict(pos_att_type=word)))
    batch = deberta_batch(DEBERTA)
    close(Deberta.from_pretrained(tmp_path)(*batch)[batch[2]], deberta_read(theirs, *batch))


@pytest.mark.parametrize("change", [dict(pos_att_type=["c2p"]), dict(position_biased_input=True), dict(relative_attention=False)])
def test_deberta_refuses_other_attention(change, tmp_path):
    transformers.DebertaConfig(**DEBERTA | change).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="|".join(change)):
        Deberta.from_pretrained(tmp_path)


def small(kind=Deberta, **changes):
    sizes = dict(vocab_size=37, max_len=16, d_model=24, n_heads=4, d_ff=40, n_layers=2, max_distance=5)
    return made_loud(kind(DebertaConfig(**sizes | changes)))


def by_hand(model, ids):
    "Scores of the first block, head by head and pair by pair, as equation 4 and the text around it say."
    x, layer, one = model.embedding(ids)[0], model.stack.blocks[0].attention.layer, model.relatives[0]
    q, k, _ = (part[0] for part in layer.split(layer.query_key_value(x[None])))
    heads = lambda y: y.unflatten(-1, (4, 6))
    scores = torch.zeros(4, len(x), len(x))
    for i in range(len(x)):
        for j in range(len(x)):
            # as in the code of the authors, where the paper has Q^r of j - i
            vector = model.distances.weight[min(max(i - j + 5, 0), 9)]
            key, query = heads(one.key(vector)), heads(one.query(vector))
            for h in range(4):
                scores[h, i, j] = q[h, i] @ k[h, j] + q[h, i] @ key[h] + k[h, j] @ query[h]
    return scores / 18**0.5


def test_deberta_scores_are_equation_4():
    model, ids = small(), torch.randint(1, 37, (1, 9))
    weights = model.stack.blocks[0].attention.layer(model.embedding(ids), relative=model.slots()[0], need_weights=True)[1]
    assert_close(weights[0], by_hand(model, ids).softmax(-1), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kind", [Deberta, DebertaForMaskedLM, DebertaForPreTraining])
def test_deberta_does_not_see_padding(kind):
    model, ids, mask = small(kind), torch.randint(1, 37, (3, 11)), lengths(11, 4, 7)
    other = torch.where(mask, ids, torch.randint(1, 37, ids.shape))
    assert torch.equal(model(ids, mask=mask)[mask], model(other, mask=mask)[mask])
    close(model(ids[1:2, :4])[0], model(ids, mask=mask)[1, :4].detach(), name="without padding")


def test_a_classifier_stands_on_deberta():
    "A trunk with BERT's pooler, for those who ask: the classes are read from the first piece's state."

    class DebertaForClasses(BertForSequenceClassification):
        trunk_class = Deberta

        def __init__(self, config: DebertaConfig):
            super().__init__(config)

    model, ids = small(DebertaForClasses, n_classes=3), torch.randint(1, 37, (2, 8))
    pooler, classifier, first = model.trunk.pooler.dense, model.classifier, model.trunk(ids)[:, 0]
    close(model(ids), torch.tanh(first @ pooler.weight.T + pooler.bias) @ classifier.weight.T + classifier.bias)
    assert small(Deberta).pooler is None


def test_the_mask_decoder_alone_knows_where_a_word_is():
    "One word again and again: distances say nothing, so all positions look alike to the trunk, and not to the decoder."
    ids = torch.full((1, 9), 7)
    flat = small(max_distance=1)
    flat.distances.weight.data[1] = flat.distances.weight.data[0]
    states = flat(ids)
    assert_close(states, states[:, :1].expand_as(states), atol=1e-5, rtol=0)
    model = small(DebertaForPreTraining, max_distance=1)
    model.trunk.load_state_dict(flat.state_dict())
    logits = model(ids)
    assert (logits[0, 1:] - logits[0, :-1]).abs().amax(-1).min() > 1e-2


def test_the_mask_decoder_without_positions_is_the_last_block_twice():
    "By its parts: with positions of zero its first pass is the last block itself, from H to block(H)."
    model, ids, mask = small(DebertaForPreTraining), torch.randint(1, 37, (2, 8)), lengths(8, 5)
    model.positions.table.data.zero_()
    below, last = model.trunk.states(ids, mask=mask, all_layers=True)[-2:]
    block, slot = model.trunk.stack.blocks[-1], model.trunk.slots()[-1]
    once = block.attention(below, mask=mask, relative=slot, memory=below)
    assert_close(block.feed_forward(once)[mask], last[mask])
    layer = block.attention.layer
    q = layer.split(layer.query_key_value(last))[0]
    k, v = layer.split(layer.query_key_value(below))[1:]
    scores = q @ k.mT * model.config.three_terms + slot(q, k, 0)[2]
    mixed = scores.masked_fill(~mask[:, None, None], -torch.inf).softmax(-1) @ v
    x = block.attention.norm(last + layer.out(mixed.transpose(1, 2).flatten(2)))
    x = block.feed_forward.norm(x + block.feed_forward.layer(x))
    assert_close(model.decode(below, mask)[mask], x[mask], atol=1e-5, rtol=1e-5)


def test_the_mask_decoder_is_kept(tmp_path):
    "In a file of its own kind, which `transformers` reads without the positions."
    model, ids = small(DebertaForPreTraining, max_distance=16), torch.randint(1, 37, (2, 8))
    model.save_pretrained(tmp_path)
    assert torch.equal(DebertaForPreTraining.from_pretrained(tmp_path)(ids), model(ids))
    plain = DebertaForMaskedLM.from_pretrained(tmp_path)
    theirs = transformers.DebertaForMaskedLM.from_pretrained(tmp_path).eval()
    close(plain(ids), theirs(ids).logits)


def test_a_checkpointed_deberta_has_the_same_gradients():
    model, ids = small(), torch.randint(1, 37, (2, 8))
    first = torch.autograd.grad(model(ids).sum(), model.distances.weight)[0]
    model.stack.checkpoint = True
    assert_close(torch.autograd.grad(model(ids).sum(), model.distances.weight)[0], first)


def vector_gradients(ours, theirs, outputs, folder, idle=lambda part, config: False, tolerance=1e-5):
    "Of one random loss over the real tokens."
    weights = torch.randn_like(outputs[0])
    same_gradients(ours, theirs, [(x * weights).sum() / len(x) for x in outputs], tolerance, folder, idle=idle)


# CANINE

CANINE = dict(
    hidden_size=24, num_attention_heads=4, intermediate_size=40, num_hidden_layers=2, max_position_embeddings=50, num_hash_buckets=50,
    num_hash_functions=3, local_transformer_stride=8, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, type_vocab_size=3,
)  # fmt: skip
CANINES = {
    "plain": {},
    "rate": dict(downsampling_rate=3, upsampling_kernel_size=5, hidden_act="gelu_new"),
    "even kernel": dict(downsampling_rate=2, upsampling_kernel_size=2, num_hash_functions=8, layer_norm_eps=1e-3),
    "one chunk": dict(local_transformer_stride=128, num_hash_functions=1, hidden_act="relu"),
}


@pytest.mark.parametrize("n", [4, 7, 29, 32, 47])
@pytest.mark.parametrize("odd", CANINES)
def test_canine_is_theirs(odd, n, tmp_path):
    "States, every gradient, and files in both directions, at lengths that end within a group or a chunk."
    theirs = made(transformers.CanineModel, CANINE | CANINES[odd])
    theirs.save_pretrained(tmp_path / "theirs")
    ours = Canine.from_pretrained(tmp_path / "theirs")
    mask = lengths(n, n - 1, n - n // 3, max(n - 8, 1), n // 8 * 8 or 1)
    ids, segments = torch.randint(1, 0x2000, mask.shape), torch.randint(3, mask.shape)
    run = lambda model, real=mask: model(ids, segments, mask)[real]
    read = lambda model, real=mask: model(ids, attention_mask=mask.long(), token_type_ids=segments)[0][real]
    close(run(ours), read(theirs))
    layers = theirs(ids, attention_mask=mask.long(), token_type_ids=segments, output_hidden_states=True).hidden_states
    for mine, wanted in zip(ours.states(ids, mask, segments=segments, all_layers=True)[2:-2], layers[2:-2], strict=True):
        close(mine[0], wanted[0])  # molecules of the row without padding
    # where a chunk of padding follows, theirs lets gradients through scores that it has made equal
    ends = mask.sum(1)
    some = mask & ((ends == n) | ((ends % 8 > 0) & (ends % 8 < 7)))[:, None]
    theirs.pooler = None
    # of a text of one molecule none is made
    vector_gradients(ours, theirs, (run(ours, some), read(theirs, some)), tmp_path / "gradients", lambda part, config: True, 3e-5)
    ours.save_pretrained(tmp_path / "ours")
    again, report = transformers.CanineModel.from_pretrained(tmp_path / "ours", output_loading_info=True)
    assert report["missing_keys"] == {"pooler.dense.weight", "pooler.dense.bias"} and not report["mismatched_keys"]
    close(run(ours), read(again.eval()))


def test_hashes_are_theirs():
    layer = transformers.CanineModel(transformers.CanineConfig(**CANINE)).char_embeddings
    ids = torch.randint(0x110000, (3, 40))
    for n, buckets in ((1, 7), (8, 16_384), (16, 1000)):
        assert torch.equal(hashes(ids, n, buckets), torch.stack(layer._hash_bucket_tensors(ids, n, buckets)))


def small_canine(**changes):
    sizes = dict(max_len=50, d_model=24, n_heads=4, d_ff=40, n_layers=2, n_hashes=3, n_buckets=50, window=8)
    return made_loud(Canine(CanineConfig(**sizes | changes)))


def test_molecules_do_not_see_padding():
    "Whatever stands there; and characters see of it what the two convolutions carry over, at the end of the text."
    model, ids, mask = small_canine(), torch.randint(1, 0x2000, (3, 30)), lengths(30, 20, 9)
    other = torch.where(mask, ids, torch.randint(1, 0x2000, ids.shape))
    (_, x, (*_, molecules)), (_, y, (*_, others)) = (model.halves(each, mask) for each in (ids, other))
    seen = model.down(x, mask)[1]
    assert torch.equal(x[mask], y[mask]) and torch.equal(molecules[seen], others[seen])
    up, again = model.up(x, molecules), model.up(y, others)
    # the convolution reads two to the right; of row 2 the ninth character's group has padding in it
    for row, safe in ((0, 30), (1, 18), (2, 6)):
        assert_close(up[row, :safe], again[row, :safe])
        assert safe == 30 or (up[row, safe:] != again[row, safe:]).any()


def test_a_chunk_is_all_that_the_first_block_sees():
    model, ids = small_canine(), torch.randint(1, 0x2000, (1, 20))
    mask = torch.ones_like(ids, dtype=torch.bool)
    other = ids.clone()
    other[0, 10] += 1
    changed = (model.halves(ids, mask)[1] != model.halves(other, mask)[1]).any(-1)[0]
    assert changed.tolist() == [8 <= i < 16 for i in range(20)]


def test_canine_refuses():
    model = small_canine()
    for ids, words in ((torch.ones(1, 3).long(), "rate=4"), (torch.ones(1, 51).long(), "max_len"), (torch.full((1, 9), 0x110000), "outside")):
        with pytest.raises(ValueError, match=words):
            model(ids)
    for settings, words in ((dict(max_len=51), "n_buckets"), (dict(n_hashes=5), "n_hashes"), (dict(d_model=34, n_heads=2, n_hashes=17), "16 hash")):
        with pytest.raises(ValueError, match=words):
            small_canine(**settings)


# XLNet

XLNET = dict(vocab_size=37, d_model=24, n_head=4, d_inner=40, n_layer=2, dropout=0.0, layer_norm_eps=1e-3)
XLNETS = {"plain": {}, "one head": dict(n_head=1, ff_activation="relu"), "deep": dict(n_layer=4, n_head=6, ff_activation="gelu_new")}


def xlnet_twins(odd, folder):
    theirs = made(transformers.XLNetModel, XLNET | XLNETS[odd])
    theirs.save_pretrained(folder)
    return XLNet.from_pretrained(folder), theirs


@pytest.mark.parametrize("given", [True, False])
@pytest.mark.parametrize("odd", XLNETS)
def test_xlnet_is_theirs(odd, given, tmp_path):
    "States that see both sides, with segments and without, gradients, and files in both directions."
    ours, theirs = xlnet_twins(odd, tmp_path / "theirs")
    mask = lengths(11, 4, 7)
    ids, segments = torch.randint(37, mask.shape), torch.randint(3, mask.shape) if given else None
    run = lambda model: model(ids, segments, mask)[mask]
    read = lambda model: model(ids, attention_mask=mask.float(), token_type_ids=segments)[0][mask]
    outputs = run(ours), read(theirs)
    close(*outputs)
    layers = theirs(ids, attention_mask=mask.float(), token_type_ids=segments, output_hidden_states=True).hidden_states
    for mine, wanted in zip(ours.states(ids, mask, segments=segments, all_layers=True), layers, strict=True):
        close(mine[mask], wanted[mask])
    unused = ("mask_emb",) if given else ("mask_emb", "seg_embed", "r_s_bias")
    vector_gradients(ours, theirs, outputs, tmp_path / "gradients", lambda part, config: part.endswith(unused))
    there_and_back(ours, theirs, tmp_path / "ours", run, read)


def orders(mask):
    return torch.stack([torch.randperm(mask.shape[1]) for _ in mask])


def later(order):
    "Their `perm_mask`: 1 where a query may not see a key, here what isn't before it."
    rank = order.argsort(-1)
    return (rank[:, None, :] >= rank[:, :, None]).float()


@pytest.mark.parametrize("odd", XLNETS)
def test_xlnets_two_streams_are_theirs(odd, tmp_path):
    "For a random order of each row. Of a query that may see nothing theirs makes one that sees everything, so it is left out."
    ours, theirs = xlnet_twins(odd, tmp_path / "theirs")
    mask = lengths(11, 11, 8)
    ids, segments, order = torch.randint(37, mask.shape), torch.randint(3, mask.shape), orders(mask)
    order[2] = torch.cat([torch.randperm(8), torch.arange(8, 11)])  # padding last
    read = theirs(
        ids, attention_mask=mask.float(), token_type_ids=segments, perm_mask=later(order),
        target_mapping=torch.eye(11).expand(3, 11, 11), output_hidden_states=True,
    )  # fmt: skip
    content, query = ours.two_streams(ids, order, segments, mask)
    asked = mask.clone()
    asked[torch.arange(3), order[:, 0]] = False
    close(query[asked], read[0][asked])
    close(content[mask], read.hidden_states[-2][mask])
    vector_gradients(ours, theirs, (query[asked], read[0][asked]), tmp_path / "gradients")


def small_xlnet(**changes):
    return made_loud(XLNet(XLNetConfig(**dict(vocab_size=37, d_model=24, n_heads=4, d_ff=40, n_layers=3) | changes)))


def test_each_stream_sees_what_its_order_allows():
    "Changing one piece changes the query states of those after it in the order, and the content states of these and its own; no other."
    model, ids, order = small_xlnet(), torch.randint(36, (1, 9)), torch.randperm(9)[None]
    rank = order.argsort(-1)[0]
    content, query = model.two_streams(ids, order)
    for i in range(9):
        other = ids.clone()
        other[0, i] += 1
        changed = [(x != y).any(-1)[0] for x, y in zip((content, query), model.two_streams(other, order))]
        assert torch.equal(changed[0], rank >= rank[i])
        assert torch.equal(changed[1], rank > rank[i])


def test_from_left_to_right_the_content_stream_is_a_causal_model():
    model, ids = small_xlnet(), torch.randint(37, (2, 9))
    order = torch.arange(9).expand(2, 9)
    content, query = model.two_streams(ids, order)
    shorter = model.two_streams(ids[:, :5], order[:, :5])
    close(shorter[0], content[:, :5].detach())
    close(shorter[1], query[:, :5].detach())
    # the last in the order has seen all, as in the bidirectional model of one block
    one = small_xlnet(n_layers=1)
    close(one.two_streams(ids, order)[0][:, -1], one(ids)[:, -1].detach())


@pytest.mark.parametrize("streams", [False, True])
def test_xlnet_does_not_see_padding(streams):
    model, ids, mask = small_xlnet(), torch.randint(37, (3, 11)), lengths(11, 4, 7)
    order = orders(mask)
    run = (lambda ids: model.two_streams(ids, order, mask=mask)) if streams else lambda ids: (model(ids, mask=mask),)
    other = torch.where(mask, ids, torch.randint(37, ids.shape))
    for x, y in zip(run(ids), run(other)):
        assert torch.equal(x[mask], y[mask])
    if not streams:
        close(model(ids[1:2, :4])[0], model(ids, mask=mask)[1, :4].detach())


def test_xlnet_refuses():
    model, ids = small_xlnet(), torch.randint(37, (1, 3))
    for order in ([[0, 0, 2]], [[1, 2, 3]]):
        with pytest.raises(ValueError, match="order must have each position once"):
            model.two_streams(ids, torch.tensor(order))


@pytest.mark.parametrize("change", [dict(attn_type="uni"), dict(bi_data=True), dict(clamp_len=3)])
def test_xlnet_refuses_other_attention(change, tmp_path):
    transformers.XLNetConfig(**XLNET | change).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="|".join(change)):
        XLNet.from_pretrained(tmp_path)
