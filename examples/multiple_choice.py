"""Multiple choice: the answer whose text the model finds most probable."""

import llamapipe as lp

questions = {
    "Question: What does a cow say?\nAnswer:": [" A cow says moo.", " A cow says meow."],
    "Question: What does a cat say?\nAnswer:": [" A cat says moo.", " A cat says meow."],
}

with lp.Engine(lp.demo_model_path()) as engine:
    rows = engine.score(list(questions), list(questions.values()))
    for (question, answers), scores in zip(questions.items(), rows, strict=True):
        best = max(range(len(answers)), key=lambda i: scores[i].total)
        print(question.splitlines()[0], "->", answers[best].strip())
