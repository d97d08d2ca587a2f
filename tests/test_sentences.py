# ruff: noqa: RUF001  (marks and letters of many scripts)
from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from frameshard.sentences import MAX_HELD, Marked, Splitter
from frameshard.text import TextStream, utf8_decoder

# Each "|" marks the end of a sentence. It is not part of the text.
TABLE = [
    # Latin: marks, quotes, brackets
    "Welcome! |Sit down. |What will it be?|",
    "Any rooms left|",
    "Really?! |Yes!!! |Who is there?|",
    "It is I. |He left.|",
    "Well... maybe. |Wait… |Who is there?|",
    "Well…maybe. |Wait...what?|",
    "And . . . then. |He left . . . |She stayed.|",
    '"Go!" she said. |"Come." |Then he left.|',
    "(Or so.) |“Is it?” |‘Yes.’ |Fine.|",
    "“Is it?” he asked. |“Yes!” — she nodded. |“No…” “so” it was.|",
    "He waited... “no,” he said. |She waited... |“No,” she said.|",
    "„Ist das wahr?“ |Ja. |„Nein“, sagte er.|",
    "»Hallo.« |»Wer da?« |Niemand.|",
    "« Bonjour ! » |« Ça va ? » dit-il. |Oui.|",
    "¿Quién es? |¡Soy yo! |«Pasa.» |Vale.|",
    "**Stop.** |_Now!_ |*She smiles.* |Hello.|",
    "Hello. |*smiles warmly* How are you?|",
    "Great!😀 |Thanks. |😀 Bye.|",
    "hey! |what is it? |nothing. or so.|",
    "Stop!\t|Now. \t |Go.|",
    "(“Yes.”) |No.|",
    # abbreviations, initials, names
    "Ask Dr. Ash or Mr. Reed and Mrs. Poe. |They know.|",
    "By J. R. Stone, J.R.R. Tolkien and J.-P. Marat. |Good.|",
    "By A. I. Moss. |So do I. |Bye.|",
    "See e.g. Ash, i.e. Tom (cf. Reed). |Done.|",
    "Beer, ale, etc. and wine. |Beer, ale, etc. |Then he left.|",
    "In St. Mary lives Prof. Oak vs. Capt. Hook. |Ahoy!|",
    "Room No. 5 is free. |No. |I said no. |See p. 12, Fig. 3.|",
    "Das ist z.B. Bier, u.a. Wein. |Gut.|",
    "Das ist z. B. Bier, d. h. Wein, u. a. Met. |Gut.|",
    "Come at 5 p.m. sharp. |At 6 a.m. |Not later.|",
    "Hr. Müller und Dipl. Ing. Schmidt usw. |Dann ging er.|",
    "She has a Ph.D. in law. |A Ph.D. |Good.|",
    "А. С. Пушкин родился в Москве. |Это я. |Т.е. он.|",
    "Le roi M. Dupont et Mme. Durand. |Oui.|",
    "Ca. 50 Gäste kamen. |Vgl. Kapitel 3. |Bzw. Kapitel 4. |Ja.|",
    "Approx. 50 guests. |Cf. Reed. |Vs. Reed.|",
    "Oct. 31 is near. |Come on Jan. 5 or Sept. 6. |It was Oct. |We left in Dec. |Then came Jan.|",
    "Проф. Иванов пришёл. |См. Главу 3. |Это акад. Павлов.|",
    "La Dra. Silva y el Sig. Rossi. |Dra. Silva vino. |Vive en la Núm. 5. |Es para Ud. |Gracias.|",
    "An artist sold art. |No. |We drew a fig. |Then we left.|",
    # numbers, names with dots
    "It costs 3.14 gold, or 1.000 at 10:30. |Or 1,000.|",
    "In 1984. |It was 42. |Then 7.|",
    "See example.com/a.b?c=d now. |OK.|",
    "Use .NET or v1.2.3. |Edit main.py. |Done.|",
    "Mail a.b@c.org! |Now.|",
    "He said no.then left. |Bye.|",
    # lists and line breaks
    "1. Take the key.\n|2. Open it.\n|",
    "1. Take the key. |2. Open it.|",
    "a. First\n|b. Second\n|",
    "First line\n|Second line\n|\nThird|",
    "- apples\n|- pears\n|\n  * figs|",
    "Title\r\n|Text.\r\n|\r\nMore.|",
    "Come, Dr.\n|Ash.|",
    "\n\n Hello.\n|\n",
    "Eins.\u2028|Zwei\u2029|Drei|",
    # Chinese, Japanese, Korean
    "你好。|走！|为什么？|好|",
    "他说：“你好。”|然后走了。|",
    "他走了。|“你好。”|",
    "「はい。」|と言った。|『なに！？』|はい|",
    "（行こう。）|うん……まあ。|",
    "これは3.14です。|例：example.com。|",
    "好!|走吧?|是的.|好|",
    "1.苹果\n|2.梨\n|",
    "안녕하세요. |반갑습니다!|그래요?|",
    "嗯...好吧。|等等…好。|",
    "日本語です．|次です．|「はい．」|これは３．１４です．|",
    "すごい‼|本当⁉|はい|",
    "Stop‼ |now. |Really⁉ |Yes⁈ |What⁇|",
    # Armenian, Ethiopic, Khmer, Myanmar
    "Բարև։ |«Ինչպես ես։» |Լավ։|",
    "ሰላም። |እንዴት ነህ፧ |ደህና።|እሺ።|",
    "ខ្ញុំ។ |អ្នក៕ |បាទ|",
    "မင်္ဂလာပါ။ |နေကောင်းလား။|",
    # Devanagari
    "नमस्ते। |आप कैसे हैं? |ठीक हूँ।|",
    "डॉ. शर्मा आए। |“चलो।” |राम ने कहा॥|",
    "श्लोक॥ |मूल्य 3.5 है।|अच्छा|",
    # Arabic
    "مرحبا. |كيف حالك؟ |بخير!|",
    "هل أنت هنا؟! |نعم.|",
    "«نعم.» |قال د. أحمد.|",
    "یہ گھر ہے۔ |وہ “کتاب ہے۔” |ہاں۔|",
    # texts with few words or none
    "",
    "  \n ",
    "?! … |",
    "...|",
    "Hi. \t |Bye|",
    "Hi.|",
    '{"say": "Hi. |You!", "n": 1.5}|',
]


def sentences(pieces: list[str]) -> list[str]:
    """Returns the text between the ends of sentences. The last item may be white space."""
    splitter, text, ends = Splitter(), "", [0]
    for number, piece in enumerate(pieces or [""]):
        given, own = splitter.feed(piece, last=number + 1 >= len(pieces))
        assert list(own) == sorted(set(own))
        assert all(0 < end <= len(given) for end in own)
        ends += [len(text) + end for end in own]
        text += given
        fed = sum(map(len, pieces[: number + 1]))
        assert fed - MAX_HELD <= len(text) <= fed
    return [text[a:b] for a, b in itertools.pairwise([*ends, len(text)]) if a < b]


def pieces(content: str, cuts: list[int]) -> list[str]:
    ends = sorted({c % (len(content) + 1) for c in cuts} | {0, len(content)})
    return [content[a:b] for a, b in itertools.pairwise(ends)]


def test_the_table_is_long() -> None:
    assert len(TABLE) >= 60


@pytest.mark.parametrize("marked", TABLE)
def test_sentences_of_many_scripts(marked: str) -> None:
    wanted = [sentence for sentence in marked.split("|") if sentence]
    content = "".join(wanted)
    assert sentences([content]) == wanted
    assert sentences(list(content)) == wanted


PARTS = st.sampled_from(
    [
        *".!?…。！？।॥؟۔．‼։",
        *"\"'”’»«)」』*“„(",
        *" \n\t\u00a0",
        *"aZI5",
        "Dr",
        "No",
        "e.g",
        "...",
        "好",
        "है",
        "ما",
        "😀",
        " — ",
    ]
)


@given(st.lists(PARTS, max_size=40).map("".join), st.lists(st.integers(0, 10_000)))
def test_any_cut_gives_the_same_sentences(content: str, cuts: list[int]) -> None:
    found = sentences(pieces(content, cuts))
    assert "".join(found) == content
    assert found == sentences([content])


@given(st.text(), st.lists(st.integers(0, 10_000)))
def test_any_text_comes_out_unchanged(content: str, cuts: list[int]) -> None:
    found = sentences(pieces(content, cuts))
    assert "".join(found) == content
    assert found == sentences([content])
    assert all(sentence.strip() for sentence in found[:-1])


@given(st.sampled_from(TABLE), st.lists(st.integers(0, 10_000)), st.booleans())
def test_bytes_may_be_cut_anywhere_and_stop_strings_may_end_the_text(marked: str, cuts: list[int], stop: bool) -> None:
    content = marked.replace("|", "")
    data = content.encode()
    at = sorted({c % (len(data) + 1) for c in cuts} | {0, len(data)})
    stream, splitter, decoder = TextStream(["left", "。"] if stop else []), Splitter(), utf8_decoder()
    parts: list[Marked] = []
    for a, b in itertools.pairwise(at):
        parts.append(splitter.feed(stream.push(decoder.decode(data[a:b]))))
    parts.append(splitter.feed(stream.finish(), last=True))
    whole = TextStream(["left", "。"] if stop else [])
    text = whole.push(content) + whole.finish()
    assert "".join(part.text for part in parts) == text
    before = list(itertools.accumulate((len(part.text) for part in parts), initial=0))
    ends = [begin + end for begin, part in zip(before, parts, strict=False) for end in part.ends]
    assert ends == list(Splitter().feed(text, last=True).ends)


def test_a_sentence_does_not_wait_for_the_whole_next_one() -> None:
    assert Splitter().feed("Come in. T") == ("Come in. ", (9,))
    assert Splitter().feed("Come in! ") == ("Come in! ", (9,))
    assert Splitter().feed("来。好") == ("来。", (2,))


def test_white_space_at_the_end_is_no_sentence() -> None:
    splitter = Splitter()
    assert splitter.feed("Hi.\n\n") == ("Hi.\n", (4,))
    assert splitter.feed("", last=True) == ("\n", ())
