"""The sentences that little stories are made of, with slots in braces.

A plot is a list of stages; a story takes one alternative of each stage, in order. Whatever is chosen, the
result is correct English, because slots only hold words that fit (`stories.py` fills them).

Slots: `{N}` hero, `{kind}`, `{adj}`; `{F}` friend, `{fkind}`; `{he}`, `{him}`, `{his}` and `{fhe}`, `{fhim}`,
`{fhis}` their pronouns (capitalised: `{He}`, `{His}`, `{Fhe}`, `{Fhis}`); the rest are the lists in `WORDS`.
"""

NAMES = {
    "he": (
        "Ben Tom Max Sam Leo Pip Finn Jack Tim Otto Hugo Noah Toby Oscar Felix Bruno Theo Gus "
        "Milo Rex Ned Archie"
    ).split(),
    "she": (
        "Lily Mia Anna Zoe Ella Ruby Rosie Daisy Nora Lucy Clara Molly Ivy Hazel Luna Poppy Bella "
        "Tess Emma Ada Kiki Fay"
    ).split(),
}

WORDS: dict[str, list[str]] = {
    "kind": (
        "fox rabbit bear mouse cat dog owl hedgehog squirrel frog duck turtle pig lamb pony "
        "kitten puppy beaver otter penguin"
    ).split(),
    "adj": (
        "little small brave kind happy shy clever curious gentle cheerful young quiet friendly playful"
    ).split(),
    "colour": "red blue green yellow purple white orange pink brown".split(),
    "toy": "ball kite drum hat boat scarf bell cup button ribbon lantern whistle book".split(),
    "food": [
        "apples",
        "berries",
        "cookies",
        "nuts",
        "carrots",
        "pears",
        "plums",
        "pancakes",
        "cherries",
        "cakes",
        "sandwiches",
        "muffins",
    ],
    "place": [
        "the forest",
        "the garden",
        "the park",
        "the meadow",
        "the hill",
        "the river",
        "the lake",
        "the beach",
        "the village",
        "the farm",
        "the old bridge",
    ],
    "home": [
        "in a small house near the forest",
        "in a cosy house by the river",
        "under a big oak tree",
        "on a quiet farm",
        "at the edge of the village",
        "in a little house on a hill",
        "near a blue lake",
        "in a green valley",
    ],
    "hobby": [
        "sing",
        "dance",
        "run in the grass",
        "climb hills",
        "read books",
        "paint pictures",
        "look at the stars",
        "play in the sun",
        "collect shiny stones",
        "listen to the wind",
        "jump over puddles",
        "watch the clouds",
    ],
    "spot": [
        "under the bed",
        "behind the door",
        "in the tall grass",
        "behind a big rock",
        "under the old bench",
        "next to the well",
        "in the tree house",
        "near the gate",
        "under a pile of leaves",
        "behind the barn",
    ],
    "skill": [
        "swim",
        "fly a kite",
        "ride a bike",
        "play the drum",
        "bake bread",
        "skate",
        "whistle",
        "row a boat",
        "juggle",
        "draw a horse",
    ],
    "plant": ["flower", "sunflower", "tree", "bean plant", "pumpkin", "rose", "tomato plant"],
    "elder": ["tortoise", "goat", "badger", "raven", "donkey", "goose"],
    "baby": ["bird", "duckling", "kitten", "rabbit", "lamb", "squirrel", "fawn"],
    "build": ["a tower of stones", "a sand castle", "a snowman", "a tree house", "a little bridge", "a raft"],
    "sky": ["sunny", "warm", "bright", "windy", "cold", "cloudy", "quiet", "lovely"],
    "fear": ["the dark", "loud noises", "deep water", "high places", "big dogs", "the wind"],
    "gift": [
        "a red scarf",
        "a wooden boat",
        "a box of paints",
        "a shiny bell",
        "a warm hat",
        "a new drum",
        "a book of songs",
        "a blue kite",
    ],
    "room": ["the kitchen", "the attic", "the garden", "the barn"],
}

OPENINGS = [
    "Once upon a time, there was a {adj} {kind} named {N}.",
    "Once upon a time, a {adj} {kind} named {N} lived {home}.",
    "There once was a {adj} {kind} named {N}.",
    "{N} was a {adj} {kind} who lived {home}.",
    "Long ago, a {adj} {kind} named {N} lived {home}.",
]
HABITS = [
    "{He} loved to {hobby}.",
    "Every day, {he} liked to {hobby}.",
    "{N} liked to {hobby} and to {hobby2}.",
    "More than anything, {he} loved to {hobby}.",
    "When the sun was out, {he} liked to {hobby}.",
]
ENDINGS = [
    "From that day on, {N} and {F} were best friends.",
    "{N} and {F} went home together, tired but happy.",
    "That night, {N} fell asleep with a smile.",
    "It had been a wonderful day.",
    "And they all lived happily ever after.",
    "{N} never forgot that day.",
]

PLOTS: dict[str, list[list[str]]] = {
    "lost toy": [
        [
            "One day, {N} lost {his} {colour} {toy}.",
            "One {sky} morning, {N} could not find {his} {colour} {toy}.",
        ],
        [
            "{He} looked {spot}, but it was not there.",
            "{He} looked {spot} and {spot2}, but it was not there.",
            "{He} looked everywhere, but the {toy} was gone.",
        ],
        ["{N} felt very sad.", "{N} began to cry.", "{N} sat down and sighed."],
        [
            'Then {F} the {fkind} came by. "What is wrong?" asked {F}.',
            'Soon {F} the {fkind} came along. "Why are you sad?" {fhe} asked.',
        ],
        ['"I cannot find my {colour} {toy}," said {N}.', '"My {toy} is gone," said {N}.'],
        ['"Do not worry," said {F}. "I will help you."', '"Let us look for it together," said {F}.'],
        [
            "They searched for a long time.",
            "They walked all the way to {place} and back.",
            "They asked everyone they met.",
        ],
        [
            "At last, they found the {toy} {spot3}.",
            "Then {F} saw something {colour} {spot3}. It was the {toy}!",
        ],
        [
            "{N} was so happy that {he} gave {F} a big hug.",
            '"Thank you, {F}!" said {N}. "You are a true friend."',
        ],
    ],
    "sharing": [
        [
            "One {sky} day, {N} went to {place} with a basket of {food}.",
            "One day, {N} picked a basket of {food}.",
        ],
        ["On the way, {he} met a {fkind} named {F}.", "Near {place2}, {he} saw a {fkind} named {F}."],
        ["{F} looked tired and hungry.", "{F} had nothing to eat."],
        ['"Would you like some {food}?" asked {N}.', '"You can share my {food}," said {N}.'],
        ['"Yes, please!" said {F}.', '"That is very kind of you," said {F}.'],
        ["They sat down in the shade and ate the {food} together.", "They ate until the basket was empty."],
        [
            "Then {F} told {N} a funny story, and they both laughed.",
            "After that, {F} showed {N} the way to {place3}.",
            "The {food} tasted even better because they were shared.",
        ],
    ],
    "storm": [
        [
            "One day, {N} was walking to {place} when dark clouds came.",
            "One afternoon, {N} was playing near {place}. Suddenly, the sky turned grey.",
        ],
        ["It began to rain very hard.", "The wind blew, and the rain fell."],
        ["{N} was cold and wet.", "{N} ran as fast as {he} could, but {he} was soon wet."],
        ["Then {he} saw a light in a small window.", "Then {he} heard a friendly voice."],
        [
            '"Come in!" called {F} the {fkind}. "It is warm and dry in here."',
            '{F} the {fkind} opened the door. "Come in and get dry," {fhe} said.',
        ],
        [
            "{F} made hot tea, and they ate {food} by the fire.",
            "{N} sat by the fire, and {F} brought {him} a warm blanket.",
        ],
        [
            "Soon the rain stopped, and a rainbow filled the sky.",
            "When the storm was over, the sun came out again.",
        ],
        ['"Thank you for your help," said {N}.', '"Next time it rains, you can come to my house," said {N}.'],
    ],
    "skill": [
        ["{N} wanted to learn how to {skill}.", "More than anything, {N} wanted to {skill}."],
        ["One day, {he} tried, but it did not work.", "The first time, {he} failed."],
        ['"I will never learn it," {he} said.', '"This is too hard," said {N}.', "{He} wanted to give up."],
        [
            '{F} the {fkind} watched {him}. "Try again," {fhe} said. "I will show you how."',
            '"Do not give up," said {F} the {fkind}. "Everyone needs time to learn."',
        ],
        ["So {N} practised every day.", "They practised together all week."],
        ["{He} got a little better each time.", "Sometimes it went wrong, but {he} kept trying."],
        ["Then, one {sky} morning, {N} could {skill} all by {him}self.", "At last, {N} could {skill}!"],
        ['"Look at me!" {he} shouted with joy.', "{F} clapped and cheered.", "{N} felt very proud."],
    ],
    "seed": [
        [
            "One spring day, {N} found a tiny seed near {place}.",
            "One day, an old {elder} gave {N} a tiny seed.",
        ],
        [
            "{He} planted it in the garden and gave it water.",
            "{He} put it into the ground and covered it with soil.",
        ],
        ["Every morning, {N} looked at the soil, but nothing happened.", "Days went by, and nothing grew."],
        [
            '"Be patient," said {F} the {fkind}. "Good things take time."',
            '"You have to wait," said {F} the {fkind}. "It will grow soon."',
        ],
        ["{N} waited and waited.", "So {N} watered it every day and waited."],
        [
            "Then, after the rain, a small green leaf came up.",
            "One {sky} morning, {he} saw a small green leaf.",
        ],
        [
            "It grew and grew until it was a big {plant}.",
            "By summer, it was the finest {plant} in the valley.",
        ],
        ["Everyone came to see it.", "{N} was very proud of it."],
    ],
    "fear": [
        ["{N} was afraid of {fear}.", "There was one thing {N} did not like. {He} was afraid of {fear}."],
        ["{He} did not tell anyone about it.", "{He} always hid when {he} was afraid."],
        [
            'One day, {F} the {fkind} asked, "Why are you hiding?"',
            'One evening, {F} the {fkind} found {him} {spot}. "What is the matter?" asked {F}.',
        ],
        ['"I am afraid of {fear}," said {N} in a small voice.', '"I am scared," said {N}.'],
        [
            '"I was scared once, too," said {F}. "Take my hand."',
            '"That is all right," said {F}. "I will stay with you."',
        ],
        ["They took a deep breath and counted to ten.", "They held hands and sang a song."],
        ["Little by little, the fear became smaller.", "Soon {N} did not feel so afraid."],
        ['"I did it!" said {N}.', "{N} smiled, because now {he} felt brave."],
    ],
    "old helper": [
        [
            "One {sky} day, {N} met an old {elder} on the road.",
            "One day, {N} saw an old {elder} near {place}.",
        ],
        ["The {elder} carried a heavy bag.", "The {elder} was trying to carry a big sack of {food}."],
        ['"May I help you?" asked {N}.', '"That looks heavy," said {N}. "Let me carry it."'],
        ['"You are very kind," said the {elder}.', "The {elder} smiled and said yes."],
        ["They walked slowly over the hill and through the woods.", "They walked all the way to {place2}."],
        [
            "At the door, {F} the {fkind} was waiting for them.",
            "There they met {F}, a {fkind} who lived next door.",
        ],
        ["The {elder} gave them both warm {food}.", "The {elder} gave {N} {gift} to say thank you."],
        [
            '"Helping others makes me happy," said {N}.',
            "{N} and {F} promised to visit the {elder} every week.",
        ],
    ],
    "birthday": [
        ["It was the birthday of {F} the {fkind}.", "Tomorrow was the birthday of {F} the {fkind}."],
        ["{N} wanted to give {fhim} something special.", "{N} did not know what to give {fhim}."],
        ["{He} had no money, so {he} made {gift}.", "{He} worked all day and made {gift}."],
        ["{N} also baked a cake with {food} on top.", "Then {he} filled a basket with {food}."],
        ["In the evening, all the friends came to {place}.", "All the friends hid {spot} and waited."],
        ['"Happy birthday, {F}!" they all shouted.', 'When {F} came in, they shouted, "Surprise!"'],
        ["{F} opened the present and found {gift} inside.", "{F} could not believe {fhis} eyes."],
        ['"This is the best birthday ever," said {F}.', "They danced and sang until the moon came up."],
    ],
    "race": [
        ["One day, there was a big race near {place}.", "Every summer, there was a race around {place}."],
        [
            "{N} wanted to win, and so did {F} the {fkind}.",
            "{F} the {fkind} was the fastest runner in the village.",
        ],
        [
            '"Ready, steady, go!" called the old {elder}.',
            "The old {elder} rang a bell, and they began to run.",
        ],
        ["At first, {F} was in front.", "{N} ran as fast as {he} could."],
        ["Then {F} fell over a stone and hurt {fhis} leg.", "Suddenly, {F} tripped and fell down."],
        ["{N} stopped and helped {fhim} up.", "{N} could have won, but {he} stopped to help."],
        ["They crossed the line together, side by side.", "They walked to the end together."],
        ["Everyone cheered for both of them.", '"A good friend is better than a prize," said {F}.'],
    ],
    "baby animal": [
        [
            "One morning, {N} heard a small sound near {place}.",
            "One {sky} day, {N} heard someone crying {spot}.",
        ],
        ["It was a baby {baby}.", "A baby {baby} sat all alone in the grass."],
        ['"I want my mother," said the baby {baby}.', 'The baby {baby} was lost. "Please help me," it said.'],
        ['"I will take you home," said {N}.', '"Come with me," said {N}. "We will find her."'],
        ["{N} asked {F} the {fkind} for help.", "On the way, they met {F} the {fkind}, who knew the way."],
        ["They looked near {place2} and near {place3}.", "Together, they walked for an hour."],
        [
            "At last, they found the mother of the little {baby}.",
            "Then they heard the mother calling for her baby.",
        ],
        ["She was very happy and thanked them.", '"Thank you for bringing my baby home," she said.'],
    ],
    "building": [
        ["One {sky} day, {N} wanted to build {build}.", "Early in the morning, {N} began to build {build}."],
        ["It was hard work.", "{He} worked hard and did not stop to rest."],
        ["But then the wind came, and everything fell down.", "It was almost done when it fell apart."],
        ["{N} was angry and kicked a stone.", "{N} wanted to cry."],
        [
            '"Let us try again," said {F} the {fkind}. "This time we will do it together."',
            '"It is not so bad," said {F} the {fkind}. "I will help you."',
        ],
        [
            "{F} brought what they needed, and {N} put it all in place.",
            "They worked side by side until the evening.",
        ],
        ["When they were done, it was better than before.", "This time, it did not fall."],
        ['"We make a good team," said {N}.', "They ate {food} and looked at what they had made."],
    ],
    "star": [
        ["One night, {N} could not sleep.", "One {sky} night, {N} sat by the window."],
        ["{He} looked at the sky and saw a bright star.", "A bright star fell from the sky."],
        ['"I wish I had a friend," said {N}.', "{He} closed {his} eyes and made a wish."],
        ["The next morning, someone knocked at the door.", "In the morning, {he} heard a voice outside."],
        [
            'It was a {fkind}. "My name is {F}," {fhe} said. "Do you want to play?"',
            'A {fkind} stood at the door. "Hello, I am {F}," said the {fkind}.',
        ],
        ["They played near {place} all day.", "They walked to {place} and looked for {food}."],
        ["In the evening, {N} told {F} about the star.", "They liked all the same games."],
        ['"Your wish came true," said {F}.', "{N} looked up and thanked the star."],
    ],
}
