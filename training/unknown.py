"""Questions that ``voicechat-small`` cannot answer and must not try to: words from in and out of its domain.

Some are far from what it knows, some differ from a question that it does know by one word.
"""

from collections.abc import Iterator

__all__ = ["UNKNOWN_ANSWER", "questions"]

UNKNOWN_ANSWER = "I am sorry, I do not know that."

PLAIN = """
who invented the telephone|how far away is the moon|why is the ocean salty|when was the last ice age
how do airplanes fly|who wrote this song|what should i cook for dinner|how tall is that building
where did i leave my keys|can you order a pizza|please turn off the lights|play my favorite song
call my mother|send a message to my boss|set an alarm for tomorrow|remind me to buy bread
what is the capital of france|who is the president|how many people live in china|what is the meaning of life
tell me a joke|sing a song for me|read me a story|do you like football
which team won the game|how much does a car cost|is it going to rain on my birthday|where is the nearest hotel
how do i get to the airport|book a table for two|what is on television tonight|who painted this picture
how do you spell elephant|translate this into spanish|what is a black hole|how old is the earth
why do cats purr|what do bears eat|how long do turtles live|can penguins fly
are you a robot|do you dream at night|where do you live|how old are you
what are you wearing|do you have a brother|are you happy|what did you do yesterday
tell me about your family|what do you think of me|can you keep a secret|who made you
how do i fix my computer|why is my phone so slow|what is the best movie ever|open the front door
close the kitchen window|what is in the garden|is there any coffee left|bring me some water
where is my friend|who is the doctor|how deep is the river|how high is the mountain
did the dragon win|is the monkey hungry|what does money buy|why is the table green
how cold is winter|when does summer start|who plays the music|what is the paper about
is my pencil blue|what is silver worth|how little is tiny|where do chickens sleep
what is the price of gold|how do i bake a cake|what happened in the news today|how do magnets work
who is your best friend|give me some good advice|what is my horoscope|how much do i weigh
where can i buy shoes|when does the train leave|which bus goes downtown|is the store open today
how many stars are there|what is the fastest animal|why do people yawn|what is the longest river
how do i lose weight|what is the square root of two|who won the war|what language do they speak there
how do plants grow|explain the theory of gravity|what is inside the sun|why is grass soft
is snow made of water|does the night ever end|what do frogs drink|where does milk come from
how is coal made|how big is the sea|can a banana talk|who likes tomatoes
i lost my wallet|i am very tired today|i want to go home|we are going on holiday
my head hurts a lot|that was really funny|the movie was boring|i had eggs for breakfast
it is my birthday today|nobody told me anything|she lives across the street|they forgot the tickets
what about the other one|could you explain that again|why not|how come
what should i do now|where are we going|who was that|when is the meeting
look at that bird|this is a great idea|let us go for a walk|maybe some other time
"""

# A frame and what may stand in it.
FRAMES = {
    "what is the weather in {}": "chicago|boston|moscow|my town|the desert|texas|india|the mountains",
    "what color is the {}": "car|house|river|table|flag|shirt|dragon|door",
    "what is the opposite of {}": "music|paper|seven|garden|monday|window|pencil|cow",
    "what does the {} say": "fox|fish|doctor|snake|radio|king|letter|horse",
    "what day comes after {}": "christmas|tomorrow|winter|easter|my birthday|the weekend",
    "what is {} times {}": "two five|six seven|nine nine|three four|ten ten|eight two",
    "what is {} divided by {}": "ten two|eight four|nine three|six three|twenty five|seven two",
    "who is {}": "peter pan|the boss|my neighbor|shakespeare|the captain|in charge",
    "where is {}": "london bridge|my sister|the bathroom|paris hilton|the station|africa",
    "how many {} are there": "apples|days in a year|cities|colors|words in english|planets",
    "can you {}": "dance|swim|drive a car|cook rice|play the piano|count sheep|see the moon",
    "please {}": "open the window|make some coffee|call a doctor|wait a minute|find my pencil|clean the kitchen",
    "tell me {}": "a secret|the truth|about the moon|your age|the news|what you ate|the score",
    "do you know {}": "my name|the queen|any songs|how to ski|what love is|the answer",
    "what time does the {}": "bank open|movie start|sun rise|game begin|store close|train arrive",
    "i like {}": "purple monkeys|cold coffee|green tea|loud music|old houses|big dogs",
    "my favorite {}": "color is red|food is pasta|day is friday|number is four|sport is tennis|city is rome",
    "why is the {}": "sky blue|sun hot|dog sad|sea so big|night black|cat asleep",
}


def questions() -> Iterator[str]:
    """Each question once, in an order that does not change."""
    for line in PLAIN.strip().splitlines():
        yield from line.split("|")
    for frame, fillings in FRAMES.items():
        for filling in fillings.split("|"):
            yield frame.format(*(filling.split() if frame.count("{}") > 1 else [filling]))
