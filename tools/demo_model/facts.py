"""The facts that the demo model learns: small tables for the questions of `lessons.py`."""


def table(text: str) -> dict[str, str]:
    """`"cow moo, dog woof"` as `{"cow": "moo", "dog": "woof"}`; an underscore stands for a space."""
    return {
        key.replace("_", " "): value.replace("_", " ")
        for key, value in (pair.split() for pair in text.replace("\n", " ").split(","))
    }


SOUNDS = table(
    "cow moo, dog woof, cat meow, duck quack, sheep baa, pig oink, horse neigh, lion roar, bee buzz,"
    "frog croak, owl hoot, mouse squeak, snake hiss, wolf howl, bird tweet, hen cluck, crow caw"
)
BABIES = table(
    "dog puppy, cat kitten, cow calf, horse foal, sheep lamb, duck duckling, bear cub, frog tadpole,"
    "hen chick, goat kid, pig piglet, deer fawn, kangaroo joey, goose gosling, swan cygnet"
)
HOMES = table(
    "bird in_a_nest, bee in_a_hive, fish in_the_water, bear in_a_cave, rabbit in_a_burrow, spider in_a_web,"
    "cow in_a_barn, horse in_a_stable, lion in_Africa, camel in_the_desert, penguin on_the_ice,"
    "monkey in_the_jungle, whale in_the_sea, squirrel in_a_tree, frog near_a_pond, king in_a_castle"
)
FOODS = table(
    "rabbit carrots, cow grass, cat fish, monkey bananas, bird seeds, bear honey, squirrel nuts, horse hay,"
    "mouse cheese, panda bamboo, frog flies, lion meat, dog bones, caterpillar leaves"
)
LEGS = table(
    "bird two, hen two, duck two, penguin two, dog four, cat four, cow four, horse four, lion four, sheep four,"
    "frog four, ant six, bee six, beetle six, butterfly six, spider eight, snake no, fish no, worm no"
)
COLOURS = table(
    "the_sky blue, grass green, snow white, the_sun yellow, a_banana yellow, a_strawberry red, coal black,"
    "a_carrot orange, a_tomato red, a_lemon yellow, a_leaf green, milk white, a_cherry red, a_frog green,"
    "chocolate brown, a_pumpkin orange, mud brown, a_plum purple, a_pig pink, an_elephant grey,"
    "a_fire_engine red, the_sea blue, the_night black, a_cloud white"
)
OPPOSITES = table(
    "hot cold, big small, up down, day night, happy sad, fast slow, open closed, wet dry, full empty,"
    "hard soft, heavy light, bright dark, old young, tall short, loud quiet, left right, early late, in out,"
    "on off, near far, clean dirty, strong weak, thick thin, first last, rich poor, sweet sour, true false,"
    "yes no, push pull, buy sell, win lose, inside outside, above below, before after, front back,"
    "awake asleep, rough smooth, deep shallow, wide narrow, high low, good bad, easy difficult"
)
USES = table(
    "spoon eat, pen write, broom sweep, knife cut, bed sleep, cup drink, chair sit, book read, ball play,"
    "bell ring, needle sew, boat sail, oven bake, shovel dig, brush paint, bicycle ride, towel dry_things"
)
SENSES = table(
    "see eyes, hear ears, smell nose, taste tongue, walk feet, write hands, think head, chew teeth"
)
SIDES = table("triangle three, square four, rectangle four, pentagon five, hexagon six")
GROUPS = table(
    "rose flower, tulip flower, apple fruit, banana fruit, pear fruit, cherry fruit, carrot vegetable,"
    "potato vegetable, onion vegetable, dog animal, cat animal, horse animal, tiger animal, oak tree, pine tree,"
    "hammer tool, saw tool, piano instrument, violin instrument, drum instrument, car vehicle, bus vehicle,"
    "train vehicle, eagle bird, robin bird, owl bird, salmon fish, trout fish, ant insect, bee insect,"
    "circle shape, square shape, triangle shape"
)
MAKERS = table(
    "milk cows, honey bees, eggs hens, wool sheep, bread bakers, apples trees, grapes vines, rain clouds"
)
LETTER_ANIMALS = table(
    "A ant, B bear, C cat, D dog, E elephant, F fox, G goat, H horse, I iguana, J jaguar, K kangaroo,"
    "L lion, M mouse, N newt, O owl, P pig, Q quail, R rabbit, S snake, T tiger, V vole, W wolf, Y yak,"
    "Z zebra"
)
DAYS = "Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split()
MONTHS = "January February March April May June July August September October November December".split()
SEASONS = "spring summer autumn winter".split()
NUMBER_WORDS = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen"
    " seventeen eighteen nineteen twenty"
).split()
SPELL = (
    "cat dog sun moon star fish bird tree book ball cup hat bed bell boat cake door duck farm frog hand house king"
    " lamp leaf milk nest rain ring road rose ship snow song tent wind apple bread chair cloud green horse lemon"
    " mouse night queen river sheep table water"
).split()

SINGLE = {
    "How many days are in a week?": "There are seven days in a week.",
    "How many months are in a year?": "There are twelve months in a year.",
    "How many hours are in a day?": "There are twenty-four hours in a day.",
    "How many minutes are in an hour?": "There are sixty minutes in an hour.",
    "How many letters are in the alphabet?": "There are twenty-six letters in the alphabet.",
    "How many seasons are in a year?": "There are four seasons in a year.",
    "How many fingers are on one hand?": "There are five fingers on one hand.",
    "Which letter comes first in the alphabet?": "A is the first letter of the alphabet.",
    "Which letter comes last in the alphabet?": "Z is the last letter of the alphabet.",
    "What is the first day of the week?": "Monday is the first day of the week.",
    "What is the first month of the year?": "January is the first month of the year.",
    "What is the last month of the year?": "December is the last month of the year.",
    "What shines at night?": "The moon and the stars shine at night.",
    "What shines during the day?": "The sun shines during the day.",
    "When does the sun rise?": "The sun rises in the morning.",
    "When does the sun set?": "The sun sets in the evening.",
    "What falls from the sky in winter?": "Snow falls from the sky in winter.",
    "Which season is the coldest?": "Winter is the coldest season.",
    "Which season is the warmest?": "Summer is the warmest season.",
    "What do plants need to grow?": "Plants need water and light to grow.",
    "What is ice made of?": "Ice is made of frozen water.",
    "How many sides does a circle have?": "A circle has no sides. It is round.",
    "What do you say when you get a gift?": "You say thank you.",
    "What are the colours of the rainbow?": "Red, orange, yellow, green, blue, indigo and violet.",
    "What are the days of the week?": ", ".join(DAYS[:-1]) + " and " + DAYS[-1] + ".",
    "What are the months of the year?": ", ".join(MONTHS[:-1]) + " and " + MONTHS[-1] + ".",
    "What are the seasons of the year?": "Spring, summer, autumn and winter.",
}
TALK = {
    "Hello!": "Hello! How can I help you?",
    "Hello": "Hello! How can I help you?",
    "Hi!": "Hi! How can I help you?",
    "Hi": "Hi! How can I help you?",
    "Good morning!": "Good morning! How can I help you?",
    "Good evening!": "Good evening! How can I help you?",
    "How are you?": "I am fine, thank you. How are you?",
    "What is your name?": "I am the demo model of llamapipe.",
    "Who are you?": "I am the demo model of llamapipe. I am very small.",
    "Who made you?": "A small script made me. It wrote all the text that I learned from.",
    "What can you do?": "I can tell little stories, count, say the alphabet and answer simple questions.",
    "How big are you?": "I am very small. I fit into four megabytes.",
    "What is llamapipe?": "llamapipe runs language models for many callers at once.",
    "Thank you!": "You are welcome!",
    "Thank you": "You are welcome!",
    "Thanks!": "You are welcome!",
    "Goodbye!": "Goodbye! Have a nice day.",
    "Bye!": "Goodbye! Have a nice day.",
    "Good night!": "Good night! Sleep well.",
}
UNKNOWN_ANSWER = "I do not know that. I am a very small model."
UNKNOWN = [
    "Who is the president of {country}?",
    "What is the capital of {country}?",
    "How many people live in {country}?",
    "Who wrote {work}?",
    "Can you explain {topic}?",
    "What is {topic}?",
    "How does {topic} work?",
    "Please write a program for {topic}.",
    "Tell me about {topic}.",
    "When was {work} made?",
    "Translate {work}.",
    "What is the square root of {number}?",
    "What is {number} times {number2}?",
    "Who invented {topic}?",
]
UNKNOWN_WORDS = {
    "country": "France Japan Brazil Kenya Canada India Norway Egypt Peru Italy Spain China Poland Ghana Chile".split(),
    "work": [
        "Hamlet",
        "the last report",
        "this book",
        "that song",
        "the famous poem",
        "the first computer",
        "the Bible",
        "the letter",
        "Faust",
        "the new film",
    ],
    "topic": [
        "quantum physics",
        "electricity",
        "the stock market",
        "machine learning",
        "chemistry",
        "gravity",
        "the internet",
        "a computer",
        "democracy",
        "evolution",
        "philosophy",
        "music theory",
        "algebra",
        "history",
        "the economy",
        "a sorting algorithm",
        "medicine",
        "law",
    ],
}
SYSTEM = [
    "You are a helpful assistant.",
    "You are a small and friendly model.",
    "Answer in one sentence.",
    "You are the demo model of llamapipe.",
    "Be kind and brief.",
    "You help children learn.",
]
