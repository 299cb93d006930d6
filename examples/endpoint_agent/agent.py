"""A guessing game over OpenAI's API. Nothing of this program is Pellucid's: it would play with any model that is served so."""

import json
import os

from openai import OpenAI

GUESSES = 4

client = OpenAI()  # the address and the key are OPENAI_BASE_URL and OPENAI_API_KEY
messages = json.loads(os.environ["PELLUCID_PROMPT"])
number = int(json.loads(os.environ["PELLUCID_ANSWER"]))
found = False
for _ in range(GUESSES):
    answer = client.chat.completions.create(model="policy", messages=messages).choices[0].message
    guess = answer.content.strip()
    found = guess.isdecimal() and int(guess) == number
    if found:
        break
    hint = "?" if not guess.isdecimal() else "+" if number > int(guess) else "-"
    messages += [answer, {"role": "user", "content": hint}]
print(json.dumps({"reward": float(found), "columns": {"last_guess": guess}}))
