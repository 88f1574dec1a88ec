"""The words that training prompts are made of. None of them is in the prompts that `truedraw bench` brings along."""

from __future__ import annotations

SUBJECTS = tuple(
    """
    baking bread; photosynthesis; chess openings; the water cycle; electric cars; solar panels; the Roman roads; honey bees;
    black holes; public libraries; compound interest; jazz music; volcanoes; the printing press; yoga; coral reefs; recycling;
    space stations; the immune system; urban gardens; medieval castles; weather forecasts; coffee; tea ceremonies; bicycles;
    vaccines; the stock market; renewable energy; mountain climbing; origami; database indexes; machine learning; hash tables;
    public transport; the moon landing; migration of birds; earthquakes; the human heart; dreams; time zones; wind turbines;
    knitting; folk tales; city planning; antibiotics; dinosaurs; glaciers; the violin; budgeting; remote work; job interviews;
    meditation; running a marathon; learning to swim; sailing; astronomy; maps; clocks; paper making; pottery; photography;
    documentary films; board games; detective novels; the Silk Road; the Vikings; ancient Egypt; the Industrial Revolution;
    democracy; trade unions; taxes; inflation; insurance; small businesses; marketing; customer service; teamwork; leadership;
    negotiation; time management; study habits; note taking; public speaking; handwriting; grammar; spelling; dictionaries;
    prime numbers; fractions; probability; geometry; statistics; algebra; logic puzzles; encryption; passwords; web browsers;
    email; spreadsheets; version control; open source software; operating systems; computer networks; compilers; robots;
    mobile phones; batteries; bridges; tunnels; skyscrapers; wooden houses; insulation; heating; cooking rice; pasta sauces;
    vegetable soup; fermentation; cheese; chocolate; spices; nutrition; vitamins; sleep; stress; headaches; first aid; allergies;
    exercise at home; back pain; dental care; pets; cats; dog training; horses; farm animals; whales; sharks; spiders; ants;
    butterflies; mushrooms; oak trees; roses; herbs; composting; soil; rivers; deserts; rain forests; the Arctic; islands; tides;
    thunderstorms; rainbows; fog; snow; climate; oceans; submarines; steam engines; railways; airports;
    hot air balloons; kites; toys; theatre; opera; painting; sculpture; museums; architecture; fashion; textiles; jewellery;
    coins; stamps; birthdays; weddings; harvest festivals; school uniforms; homework; kindergartens; universities; scholarships;
    apprenticeships; volunteering; neighbours; friendship; family trees; moving house; camping; hiking boots; road trips;
    travelling by train; learning Spanish; sign language; calligraphy; radio; newspapers; advertising; podcasts; video games;
    magnets; lasers; telescopes; microscopes; atoms; the periodic table; acids and bases; evolution; genes
    """.replace("\n", " ").split(";")
)
SUBJECTS = tuple(" ".join(subject.split()) for subject in SUBJECTS)

HELD_OUT = tuple(
    " ".join(subject.split())
    for subject in """
    beekeeping laws; comets; the abacus; sourdough starters; night trains; windmills; puppets; electric guitars; seaweed; owls;
    canals; the Great Wall; barcodes; crossword puzzles; sundials; rock climbing; river deltas; satellites; public fountains;
    ice cream; bamboo; mosaic floors; tree houses; caravans; tax returns; job satisfaction; recursion; binary search;
    colour blindness; marching bands; flea markets; lullabies; drought; earthworms; penguins; metronomes; street lamps;
    hearing aids; ballet; vinegar
    """.replace("\n", " ").split(";")
)

NAMES = (
    "Ada",
    "Bruno",
    "Clara",
    "Dmitri",
    "Elif",
    "Farid",
    "Greta",
    "Hiro",
    "Ines",
    "Jonas",
    "Kemi",
    "Lena",
    "Marco",
    "Nadia",
    "Otto",
)

THINGS = (
    "kitchen tools", "garden plants", "musical instruments", "breakfast dishes", "board games", "city parks", "old coins",
    "winter clothes", "office chairs", "children's books", "wild animals", "types of cheese", "sports", "vegetables", "planets",
)  # fmt: skip

LINES = (
    "def {item}_of({name}):\n    {item} = 0\n    for entry in {name}:\n        {item} += entry\n    return {item}\n",
    "def first({name}, limit={number}):\n    for entry in {name}:\n        if entry > limit:\n            return entry\n",
    "{name} = [{number}, 4, 9, 1]\n{name}.sort(reverse=True)\nfor entry in {name}:\n    print(entry)\n",
    "class {item}:\n    def __init__(self, n={number}):\n        self.size = n\n\n    def grow(self):\n        self.size += 1\n",
    "with open('{name}.txt') as file:\n    {item} = sum(len(line.split()) for line in file)\nprint({item})\n",
    "function {item}({name}) {{\n  let n = {number};\n  for (const x of {name}) {{ n += x; }}\n  return n;\n}}\n",
)  # fmt: skip
