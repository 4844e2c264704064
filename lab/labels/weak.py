"""
Weak labels: what rules make of a text, for encyclopaedias (WikiText, plain Wikipedia) and plays.

Each labeller takes a text and gives [(start, end, value)], character spans in order that do not overlap; what
no span holds is not labelled. No person has checked these labels. docs/constraints.md describes what each
rule matches, where it fails, and how often it was right on texts that were read.

A score at a token may use only what came before and the token itself. A sentence is known to hold a number
when the number has been read, not at its first word; so labels begin at what they follow from, the trigger:
the label of a character follows from the text up to it. whole=True gives the whole sentence its label
instead, so that its first words have to predict what comes later.
"""

import re
from bisect import bisect_left

WINDOW = 800     # characters in which three speeches are an exchange
PARAGRAPH = 80   # characters: a longer line is a paragraph of its own, shorter ones go on, as in verse
HEADING = 60     # characters, at most, of a heading without marks that stands before a paragraph


def words(listed):
    """A pattern of any of the words or phrases in a list; _ stands for the white space in a phrase."""
    return re.compile(r"\b(?:" + "|".join(listed.split()).replace("_", r"\s+") + r")\b")


# ---- sentences ----

# not after "J.", "U.S." or "Dr."; the white space behind it belongs to the sentence, the next one is known by
# its first character
ENDS = re.compile(r"[.!?](?<!\b[A-Z]\.)(?<!\b(?:Mr|Ms|Dr|St|No|Lt|Mt|Jr|Sr|vs|ca)\.)"
                  r"(?<!\b(?:Mrs|Col|Gen|Rev|etc|Maj|Sgt|Vol)\.)"
                  r"""['"”’)\]]*\s+(?=[A-ZÀ-Þ"“'‘(\[])""")
SPEAKER = re.compile(r"^[ \t]*([A-Z][\w'.-]*(?: [\w'.-]+){0,3}):[ \t\r]*$", re.M)  # on a line of its own
MARKUP = re.compile(r"\s*(?:[=*#|{}!:;]|<(?!unk>))")
CLOSED = re.compile(r"""[.!?;:,…—-][\s'"”’)\]]*$""")


def sentences(text):
    """[(start, end)] of the sentences of a text, without headings, markup, names of speakers and titles."""
    found, begin = [], None

    def close(end):
        nonlocal begin
        if begin is not None:
            cuts = [begin, *(m.end() for m in ENDS.finditer(text, begin, end)), end]
            if not CLOSED.search(text, max(cuts[-2], end - 40), end):  # a title, an item of a list
                cuts.pop()
            found.extend(zip(cuts, cuts[1:]))
        begin = None

    lines = [m.span() for m in re.finditer(r"[^\n]*\n|[^\n]+$", text)]
    for i, (a, b) in enumerate(lines):
        line, longer = text[a:b], i + 1 < len(lines) and lines[i + 1][1] - lines[i + 1][0] > PARAGRAPH
        heading = longer and b - a <= HEADING and len(line.split()) <= 6
        if not line.strip() or MARKUP.match(line) or SPEAKER.match(line) or heading:
            close(a)
            continue
        if begin is None:
            begin = a + len(line) - len(line.lstrip())
        if b - a > PARAGRAPH:
            close(b)
    close(len(text))
    return found


def mark(start, end, at, whole):
    """Spans of one sentence whose label 1 follows from what ends at `at`; None: nothing of that kind."""
    if at is None:
        return [(start, end, 0.0)]
    return [(start, end, 1.0)] if whole else [(start, at, 0.0), (at, end, 1.0)]


# ---- testifiability: can it be checked? ----

CHECKABLE = re.compile(r"\d|" + words("""
    [Tt]wo [Tt]hree [Ff]our [Ff]ive [Ss]ix [Ss]even [Ee]ight [Nn]ine [Tt]en [Ee]leven [Tt]welve
    [Tt]hirteen [Ff]ourteen [Ff]ifteen [Ss]ixteen [Ss]eventeen [Ee]ighteen [Nn]ineteen [Tt]wenty [Tt]hirty
    [Ff]orty [Ff]ifty [Ss]ixty [Ss]eventy [Ee]ighty [Nn]inety hundreds? thousands? millions? billions?
    dozens? per_?cent [Tt]wice [Tt]hrice January February April June July August September October
    November December Monday Tuesday Wednesday Thursday Friday Saturday Sunday [Aa]ccording_to et_al cited
    as_reported_(?:by|in) quoted_(?:as|in|by)
    (?:wrote|writes|said|says|stated|states|noted|notes|reported|reports|remarked)_that""").pattern
    + r"""|(?:wrote|writes|said|says|stated|states|noted|notes|remarked)\s*[,:]\s*["“]""")


def testifiability(text, before="", whole=False):
    """1 in a sentence from its first checkable item on (a number, a date, a named source), 0 without one."""
    spans = []
    for start, end in sentences(text):
        item = CHECKABLE.search(text, start, end)
        spans += mark(start, end, item and item.end(), whole)
    return spans


# ---- reciprocity: does something go both ways? ----

MUTUAL = words(r"""
    each_other(?:'s)? one_another(?:'s)? [Mm]utual(?:ly)? [Rr]eciproc\w+ [Ii]n_return [Ii]n_exchange
    [Ee]xchang(?:e|ed|es|ing) trad(?:e|ed|es|ing)_(?:with|for|between) barter\w* repa(?:y|ys|id|ying)
    requit(?:e|ed|es|al) repl(?:y|ies|ied|ying) respon(?:d|ds|ded|ding|se)_to
    [Aa]nswer(?:s|ed|ing)?_(?:me|him|her|them|us|you|thee|my|your|thy|his|the|that) reward(?:s|ed|ing)?
    thank(?:s|ed)?_(?:him|her|them|us|you|thee|my|your|thy|his|the) forg(?:ive|ives|ave|iven) revenges?
    aveng(?:e|ed) retaliat\w+ compensat\w+ negotiat\w+ bargain\w* treat(?:y|ies) alliances? allied_with
    cooperat\w+ co_@-@_operat\w+ collaborat\w+ partnerships? marr(?:y|ies|ied) agree(?:d|s)?_to
    agreements? debts? ow(?:e|es|ed) both_(?:sides|parties)""")


def reciprocity(text, before="", whole=False):
    """1 in a sentence from a word of give and return or of mutuality on, and where the speech is an answer to
    an answer: the last three speakers within WINDOW characters are A, B, A. 0 in other sentences.

    before: the characters before the text, as many as WINDOW + 1 where there are, in which speeches begin.
    """
    speakers = [(m.start() - len(before), m[1].strip()) for m in SPEAKER.finditer(before + text)]
    begins, spans = [at for at, _ in speakers], []
    for start, end in sentences(text):
        turns = speakers[bisect_left(begins, start - WINDOW):bisect_left(begins, start)][-3:]
        if len(turns) == 3 and turns[0][1] == turns[2][1] != turns[1][1]:
            spans.append((start, end, 1.0))
            continue
        word = MUTUAL.search(text, start, end)
        spans += mark(start, end, word and word.end(), whole)
    return spans


# ---- decidability: a plain statement, or hedged? ----

HEDGED = words(r"""
    may mayst [Mm]ight mightst could_(?:have|be) would_have should ought can_be_(?:seen|considered)
    [Pp]erhaps [Pp]ossibl[ey] [Pp]robabl[ey] (?:un)?likely [Aa]pparently [Ss]eemingly [Ss]upposedly
    [Pp]resumably [Rr]eportedly [Aa]rguably [Aa]llegedly potentially [Pp]erchance [Hh]aply [Bb]elike
    [Pp]eradventure [Mm]ethinks seem(?:s|ed|ing)? appear(?:s|ed)?_to suggest(?:s|ed|ing)? speculat\w+
    hypothes\w+ tend(?:s|ed)?_to uncertain unclear not_(?:certain|clear|known) whether [Ii]f allegations?
    claim(?:s|ed)?_(?:to|that) (?:I|we)_(?:think|believe|fear|hope|suppose|guess) I_doubt
    (?:is|are|was|were|been)_(?:\w+_)?(?:said|thought|believed|considered|alleged|rumou?red|reputed|supposed)
    (?:is|are|was|were|been)_(?:\w+_)?(?:assumed|claimed|estimated|regarded)""")
FINITE = words(r"""
    [Ii]s are am art [Ww]as were wast has have had hath hast does do did doth dost didst will wilt shall
    shalt can cannot must would [a-z]+[^e\W]ed began became broke brought built came caught chose drew
    drove fell felt fled flew fought found gave got grew held kept knew laid lay led left lost made meant
    met paid ran rose said sang sat saw sent sold spent spoke stood struck taught told took thought went
    won wore wrote knows? makes takes gives says tells goes comes contains includes consists remains lies
    refers means becomes describes stands runs lives leads uses plays""")


def decidability(text, before="", whole=False):
    """1 in a plain statement from its finite verb on; 0 from a hedge, a modal or a condition on.

    Before the verb there is no statement yet: not labelled, nor are questions, exclamations, or no verb.
    """
    spans = []
    for start, end in sentences(text):
        if re.search(r"""[?!]['"”’)\]\s]*$""", text[max(start, end - 12):end]):
            continue
        hedge, verb = HEDGED.search(text, start, end), FINITE.search(text, start, end)
        if hedge and whole:
            spans.append((start, end, 0.0))
        elif hedge:
            if verb and verb.end() < hedge.end():
                spans.append((verb.end(), hedge.end(), 1.0))
            spans.append((hedge.end(), end, 0.0))
        elif verb:
            spans.append((start if whole else verb.end(), end, 1.0))
    return spans


LABELLERS = {f.__name__: f for f in (reciprocity, testifiability, decidability)}
