# Makes many small objects (dictionaries, lists, strings and numbers), changes and drops some, and
# prints a sum.
import hashlib
import json

words = {}
for i in range(120_000):
    words[f"key-{i * 7919 % 1_000_003}"] = [i, i * 0.5, str(i) * 3, {"n": i}]
for i in range(0, 120_000, 3):
    del words[f"key-{i * 7919 % 1_000_003}"]
text = json.dumps(words)
digest = hashlib.sha256(text.encode()).hexdigest()
again = json.loads(text)
blocks = [hashlib.sha256(str(i).encode()).digest() * 512 for i in range(2000)]
total = hashlib.sha256()
for turn in range(2):
    for block in blocks[::-1]:
        total.update(block)
print(len(words), digest, again == words, total.hexdigest(), sum(v[1] for v in words.values()))
