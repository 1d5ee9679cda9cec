"What an error message must have, for the tests that read them."

import re

REMEDIES = "must|give|make|cut|change|choose|drop|try|pass|needs?|set|tokenizer"


def says(*words: str, or_else: str = "") -> str:
    "A pattern for a message that holds every one of the words, and a remedy: one of these verbs or of `or_else`."
    remedy = rf"(?=.*\b({REMEDIES}{or_else and '|' + or_else})\b)"
    return "(?s)" + "".join(rf"(?=.*{re.escape(word)})" for word in words) + remedy
