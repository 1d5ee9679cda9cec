"What an error message must have, for the tests that read them."

import re

import pytest

REMEDIES = "must|give|make|cut|change|choose|drop|try|pass|needs?|set|tokenizer"


def says(*words: str, or_else: str = "") -> str:
    "A pattern for a message that holds every one of the words, and a remedy: one of these verbs or of `or_else`."
    remedy = rf"(?=.*\b({REMEDIES}{or_else and '|' + or_else})\b)"
    return "(?s)" + "".join(rf"(?=.*{re.escape(word)})" for word in words) + remedy


def refused(cases, act=lambda call: call(), or_else: str = "", errors=(ValueError, TypeError)):
    "A test that refuses each case, of (what `act` is done with, words of the message); by itself a case is a call."

    def label(value):
        return ",".join(f"{name}={setting}" for name, setting in value.items()) if isinstance(value, dict) else " ".join(value) if isinstance(value, list) else ""

    @pytest.mark.parametrize("case,words", cases, ids=label)
    def test(case, words, unchecked):
        with pytest.raises(errors, match=says(*words, or_else=or_else)):
            act(case)

    return test
