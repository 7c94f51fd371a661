"""What the form of an answer costs in accuracy: labels with and without a space, JSON with and without spaces.

    python benchmarks/bench_answers.py labels MODEL.gguf    200 sentences about five feelings: labels that are right
    python benchmarks/bench_answers.py json MODEL.gguf      40 messages: objects of six fields that are right

Each text is made from parts, so its answer is known. Everything is generated at temperature 0. ``json`` also prints
tokens, guessed tokens that were right, and steps.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from itertools import product
from time import perf_counter
from typing import Any, get_args

import llamapipe as lp
from llamapipe.params import JsonWhitespace

PEOPLE = ("Anna", "My neighbour", "The pilot", "Our teacher", "Mr. Sato")
FEELINGS = {
    "joy": (
        "{} laughed all evening because the long holiday had begun.",
        "{} danced around the kitchen when the letter with the good news came.",
        "{} hugged everyone after the team won the cup.",
        "{} smiled at the baby and could not stop humming.",
        "{} celebrated the new job with cake for the whole street.",
        "{} cheered when the train with the grandchildren arrived.",
        "{} said that this was the best birthday of all.",
        "{} could not wait to tell everybody about the wonderful trip.",
    ),
    "anger": (
        "{} slammed the door and shouted at the driver.",
        "{} demanded the money back and called the service a disgrace.",
        "{} was furious that somebody had scratched the car again.",
        "{} threw the papers on the floor and yelled at the clerk.",
        "{} had enough of the noise and hammered against the wall.",
        "{} wrote that such lies were an outrage.",
        "{} cursed the airline, which had lost the bags twice.",
        "{} could not believe how rude they were, and told them so loudly.",
    ),
    "fear": (
        "{} heard steps in the dark house and did not dare to breathe.",
        "{} trembled when the dog came closer and showed its teeth.",
        "{} begged us not to leave the light off that night.",
        "{} panicked as the lift stopped between two floors.",
        "{} hid under the bed while somebody tried the door.",
        "{} was terrified of the operation on Monday.",
        "{} screamed when the plane dropped in the storm.",
        "{} kept looking back, certain that someone followed.",
    ),
    "sadness": (
        "{} cried for days after the old cat had died.",
        "{} sat alone at the table that was laid for two.",
        "{} missed the children, who had moved far away.",
        "{} wept at the funeral and could not speak.",
        "{} stayed in bed, and nothing seemed worth the trouble.",
        "{} looked at the photos of the lost home with tears.",
        "{} has felt lonely and empty since the divorce.",
        "{} said goodbye for the last time and walked home in the rain.",
    ),
    "disgust": (
        "{} found a hair in the soup and pushed the plate away.",
        "{} nearly vomited because of the smell in the cellar.",
        "{} would not touch the slimy, mouldy bread.",
        "{} spat out the milk, which had turned sour weeks ago.",
        "{} felt sick at the sight of the maggots in the meat.",
        "{} held a handkerchief to the nose and left the filthy toilet.",
        "{} gagged when the drain was opened.",
        "{} said that the greasy, stinking room was revolting.",
    ),
}
PROMPTS = {"ends with a colon": "Text: {}\nEmotion:", "ends with a space": "Text: {}\nEmotion: "}

CUSTOMERS = (
    ("Maria Lopez", "Madrid", "desk lamp", 4, 129.5, False),
    ("Jonas Weber", "Hamburg", "office chair", 2, 318.0, True),
    ("Aiko Tanaka", "Osaka", "rice cooker", 1, 89.99, False),
    ("Peter O'Neill", "Cork", "garden hose", 3, 47.25, True),
    ("Fatima Zahra", "Rabat", "tea glass", 24, 60.0, False),
)
MESSAGES = (
    "Order from {0}, {1}: {3} x {2}, total {4} EUR.{5}",
    (
        "Hello, my name is {0} and I live in {1}. Please send me {3} of the {2} that I saw in your shop; I have paid "
        "{4} euros.{5} Thank you!"
    ),
    "{1}, Tuesday. {0} called in the morning. Wants the {2} ({3} pieces). We agreed on {4} euros altogether.{5}",
    "Dear team,\nthe invoice over {4} EUR for {3} x {2} goes to {0}.\nShip it to {1}, as always.{5}\nRegards",
    "Chat: 'Is the {2} in stock?' - 'Yes.' - 'Then {3}, please. {0}, {1}.' - 'That makes {4} euros.'{5}",
    "{0} from {1} bought a {2} last year and now wants {3} more of them for {4} EUR in total.{5}",
    "Purchase note\nItem: {2}\nPieces: {3}\nSum: {4} EUR\nFor: {0}\nCity: {1}\n{5}",
    "We owe {0} a parcel. Inside: {3} x {2}. It was paid on Monday ({4} EUR) and leaves for {1} tonight.{5}",
)
SPEED = {True: " It is an express delivery.", False: " Normal delivery is fine."}
FIELDS = ("customer", "city", "item", "quantity", "total", "express")
SCHEMA = {
    "type": "object",
    "properties": {
        "customer": {"type": "string"},
        "city": {"type": "string"},
        "item": {"type": "string"},
        "quantity": {"type": "integer"},
        "total": {"type": "number"},
        "express": {"type": "boolean"},
    },
    "required": list(FIELDS),
    "additionalProperties": False,
}
QUESTION = (
    "Extract the order from this message. Answer with JSON that has the fields customer, city, item, quantity, total "
    "(in euros) and express (true or false).\n\n{}"
)


def feelings() -> list[tuple[str, str]]:
    """200 sentences and their labels."""
    return [
        (sentence.format(person), label)
        for label, sentences in FEELINGS.items()
        for sentence, person in product(sentences, PEOPLE)
    ]


def orders() -> Iterator[tuple[str, dict[str, Any]]]:
    """40 messages and what they say."""
    for message, facts in product(MESSAGES, CUSTOMERS):
        yield message.format(*facts[:5], SPEED[facts[5]]), dict(zip(FIELDS, facts, strict=True))


def measure_labels(engine: lp.Engine, labels: Sequence[str]) -> None:
    """Prints how many labels are right, for each way to ask for them."""
    told = feelings()
    spaced = [f" {label}" for label in labels]
    for name, prompt in PROMPTS.items():
        prompts = [prompt.format(text) for text, _ in told]
        ways = {
            "choice, the labels alone": lp.SamplingParams(regex="|".join(labels), temperature=0),
            "choice": lp.SamplingParams(choice=labels, temperature=0),
            "choice, labels with a space": lp.SamplingParams(choice=spaced, temperature=0),
        }
        for way, params in ways.items():
            answers = [out.text.strip() for out in engine.generate(prompts, params)]
            print_right(f"{name}; {way}", answers, told)
        for way, texts in {"score": labels, "score, labels with a space": spaced}.items():
            scores = engine.score(prompts, [texts] * len(prompts))
            totals = [[score.total for score in row] for row in scores]
            print_right(f"{name}; {way}", [labels[row.index(max(row))] for row in totals], told)


def print_right(way: str, answers: Sequence[str], told: Sequence[tuple[str, str]]) -> None:
    """Prints a line."""
    n = sum(answer == label for answer, (_, label) in zip(answers, told, strict=True))
    print(f"{way}: {n} of {len(told)} right", flush=True)


def measure_json(engine: lp.Engine) -> None:
    """Prints how many objects are right for each value of ``json_whitespace``."""
    told = list(orders())
    prompts = [
        engine.model.tokenize_chat([{"role": "user", "content": QUESTION.format(text)}]) for text, _ in told
    ]
    for whitespace in get_args(JsonWhitespace):
        params = lp.SamplingParams(
            json_schema=SCHEMA, json_whitespace=whitespace, temperature=0, max_tokens=160
        )
        before, began = engine.stats(), perf_counter()
        answers = engine.generate(prompts, params)
        seconds, after = perf_counter() - began, engine.stats()
        n_rows = n_values = n_cut = 0
        for answer, (_, wanted) in zip(answers, told, strict=True):
            if answer.finish_reason != "stop":
                n_cut += 1
                continue
            fields = json.loads(answer.text)
            right = [fields[field] == value for field, value in wanted.items()]
            n_rows += all(right)
            n_values += sum(right)
        n_tokens = sum(answer.n_completion_tokens for answer in answers)
        print(
            f"{whitespace}: {n_rows} of {len(told)} whole rows right, {n_values} of {len(told) * len(FIELDS)} values, "
            f"{n_cut} cut off; {n_tokens / len(told):.1f} tokens an answer, "
            f"{sum(answer.n_accepted_tokens for answer in answers) / len(told):.1f} of them guessed right, "
            f"{after.steps - before.steps} steps, {seconds:.0f} s",
            flush=True,
        )


def main() -> None:
    """Reads the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("labels", "json"))
    parser.add_argument("model", metavar="MODEL.gguf")
    parser.add_argument("--n-seq-max", type=int, default=8)
    arguments = parser.parse_args()
    with (
        lp.Model(arguments.model) as model,
        lp.Engine(model, n_ctx=512, n_seq_max=arguments.n_seq_max) as engine,
    ):
        if arguments.what == "json":
            measure_json(engine)
        else:
            measure_labels(engine, list(FEELINGS))


if __name__ == "__main__":
    main()
