/* Tests frameshard::SentenceSplitter. Each text is passed as a whole, by single characters, and by pairs. */
#include <cstdio>
#include <string>
#include <vector>

#include "frameshard_game.hpp"

namespace {

struct Case {
    const char *text;
    std::vector<std::string> sentences;
};

const std::vector<Case> kCases = {
    {"", {}},
    {"  \n ", {}},
    {"Any rooms left", {"Any rooms left"}},
    {"Welcome! Sit down. What will it be?", {"Welcome!", "Sit down.", "What will it be?"}},
    {"It costs 3.50 gold. Or 1,000.", {"It costs 3.50 gold.", "Or 1,000."}},
    {"Ask Dr. Ash or Mr. Reed. They know.", {"Ask Dr. Ash or Mr. Reed.", "They know."}},
    {"By J. R. Stone, e.g. the mason. It was I. He left.",
     {"By J. R. Stone, e.g. the mason.", "It was I.", "He left."}},
    {"Well... maybe. Wait\xe2\x80\xa6 Who is there?!", {"Well... maybe.", "Wait\xe2\x80\xa6", "Who is there?!"}},
    {"\"Go!\" she said. (Or so.) \"Come.\" Then", {"\"Go!\" she said.", "(Or so.)", "\"Come.\"", "Then"}},
    {"*She smiles.* Hello.", {"*She smiles.*", "Hello."}},
    {"1. Take the key.\n2. Open it.", {"1. Take the key.", "2. Open it."}},
    {"First line\nSecond line\n\nThird", {"First line", "Second line", "Third"}},
    {"\xe4\xbd\xa0\xe5\xa5\xbd\xe3\x80\x82\xe8\xb5\xb0\xef\xbc\x81",
     {"\xe4\xbd\xa0\xe5\xa5\xbd\xe3\x80\x82", "\xe8\xb5\xb0\xef\xbc\x81"}},
    {"\xe3\x80\x8c\xe3\x81\xaf\xe3\x81\x84\xe3\x80\x82\xe3\x80\x8d\xe3\x81\xa8",
     {"\xe3\x80\x8c\xe3\x81\xaf\xe3\x81\x84\xe3\x80\x82\xe3\x80\x8d", "\xe3\x81\xa8"}},
    {"See example.com/a.b now. OK", {"See example.com/a.b now.", "OK"}},
};

std::vector<std::string> split(const std::string &text, size_t piece) {
    std::vector<std::string> found;
    auto take = [&](std::string_view sentence) { found.emplace_back(sentence); };
    frameshard::SentenceSplitter splitter;
    for (size_t begin = 0; begin < text.size();) {
        size_t end = std::min(text.size(), begin + piece);
        while (end < text.size() && (text[end] & 0xc0) == 0x80) {
            ++end; // each part ends at a whole character
        }
        splitter.add(std::string_view(text).substr(begin, end - begin), take);
        begin = end;
    }
    splitter.finish(take);
    return found;
}

/* Checks that a sentence is passed on before the text ends. */
int early() {
    int given = 0;
    frameshard::SentenceSplitter splitter;
    auto count = [&](std::string_view) { ++given; };
    splitter.add("Come in. T", count);
    return given == 1 ? 0 : 1;
}

} // namespace

int main() {
    int failed = early();
    for (const Case &item : kCases) {
        for (size_t piece : {1, 2, 1000}) {
            std::vector<std::string> found = split(item.text, piece);
            if (found != item.sentences) {
                ++failed;
                std::printf("in pieces of %zu: %s\n", piece, item.text);
                for (const std::string &sentence : found) {
                    std::printf("  [%s]\n", sentence.c_str());
                }
            }
        }
    }
    return failed != 0;
}
