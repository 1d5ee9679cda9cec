"Print the table of claims, one JSON object a line: `python -m tools.claims`."

import json

from annotated_nlp import lab

if __name__ == "__main__":
    for row in lab.claims():
        print(json.dumps(row))
