"Tagging: the wheel's own program gives the same tags, and nothing but plain values is loaded."

import os
import pickle
import zipfile

import pytest
from messages import says

from annotated_nlp.corpora import packages, tags
from annotated_nlp.corpora.loaders import review_sentences
from annotated_nlp.corpora.tags import CLASSES, classes, plain_pickle, tag


def theirs():
    "The tagger of the wheel, its imports of TextBlob left out."
    with zipfile.ZipFile(packages.wheel("textblob-aptagger")) as archive:
        perceptron, tagger = (archive.read(f"textblob_aptagger/{name}.py").decode() for name in ("_perceptron", "taggers"))
    space = {"BaseTagger": object, "__file__": "", "nltk": None, "MissingCorpusException": Exception}
    exec(perceptron, space)
    exec("\n".join(line for line in tagger.splitlines() if not line.startswith(("from textblob", "from __future__"))), space)
    made = space["PerceptronTagger"](load=False)
    weights = tags.weights()
    made.model.weights, made.tagdict, made.classes = weights.features, weights.sure, set(weights.tags)
    made.model.classes = made.classes
    return made


def test_tags_are_those_of_the_wheels_program():
    made = theirs()
    sentences = [row.text for row in review_sentences(split="test")[:60]]
    sentences += ["In 1999 the 3rd well-made -ish film of 12 grossed $ 1,000 .", "x", "It's a - b", "Ünïcode naïve"]
    for sentence in sentences:  # theirs takes the tags before a sentence from the one before, so one at a time
        assert tag(sentence.split()) == [one for _, one in made.tag(sentence, tokenize=False)], sentence


def test_classes_are_of_words_alone():
    found = classes("she quickly saw , in 1999 , the two old films and laughed .".split())
    assert found == ["pronoun", "adverb", "verb", None, "preposition", "number", None, "determiner", "number", "adjective", "noun", "conjunction", "verb", None]
    assert set(found) <= {*CLASSES, None} and len(CLASSES) == len(set(CLASSES)) == 9
    assert tag([]) == classes([]) == []


def test_an_empty_word():
    with pytest.raises(ValueError, match=says("words has an empty one")):
        tag(["a", ""])


@pytest.mark.parametrize("thing", [os.system, pickle.Unpickler, print, object()])
def test_a_pickle_that_names_anything_is_refused(thing):
    with pytest.raises(ValueError, match=says("give a file that holds plain values")):
        plain_pickle(pickle.dumps(thing))


def test_plain_values_are_loaded():
    value = ({"a": [1, 2.5]}, {"x", "y"}, None, True)
    for protocol in range(3):
        assert plain_pickle(pickle.dumps(value, protocol)) == value
