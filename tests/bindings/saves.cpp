/* Tests the C client's saves with bindings/saves: saves DIRECTORY. It uses no socket. Each right save is read and
 * written byte by byte as it was; each wrong one, and 1000 damaged copies of the right ones, are refused. */
#include <cstdio>
#include <fstream>
#include <iterator>
#include <memory>
#include <random>

#include "codec.h"
#include "saves.h"
#include "seam.h"

using frameshard_core::json;
using frameshard_core::Refused;
using frameshard_core::Save;

namespace {

std::string content(const std::string &path) {
    std::ifstream file(path, std::ios::binary);
    return {std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
}

/* Reads a copy on the heap without spare bytes, so that a sanitizer notices each read beyond it. */
Save read(const std::string &bytes) {
    std::unique_ptr<char[]> copy(new char[bytes.size()]);
    std::copy(bytes.begin(), bytes.end(), copy.get());
    return frameshard_core::read_save(copy.get(), bytes.size());
}

bool refused(const std::string &bytes) {
    try {
        read(bytes);
        return false;
    } catch (const Refused &why) {
        return why.status == FS_BAD_SAVE && !why.message.empty();
    }
}

json shown(const Save &save) {
    json exchanges = json::array(), steps = json::array();
    for (const auto &exchange : save.exchanges) {
        for (json step : exchange.steps) {
            step["exchange"] = exchanges.size();
            steps.push_back(step);
        }
        exchanges.push_back(json::array({exchange.question, exchange.answer}));
    }
    json fields = {{"exchanges", exchanges},
                   {"model", save.model},
                   {"system", save.system},
                   {"template", save.chat_template},
                   {"writer", save.writer}};
    if (!steps.empty()) {
        fields["steps"] = steps;
    }
    return fields;
}

/* Changes, removes or adds some bytes. */
std::string damaged(std::string bytes, std::mt19937 *random) {
    auto below = [&](size_t limit) { return size_t((*random)() % limit); };
    for (size_t times = 1 + below(3); times > 0; --times) {
        size_t at = below(bytes.size() + 1);
        std::string put(below(4), '\0');
        for (char &byte : put) {
            byte = char(below(256));
        }
        bytes.replace(at, below(8), put);
    }
    return bytes;
}

} // namespace

int main(int argc, char **argv) {
    std::string directory = argc > 1 ? argv[1] : ".";
    json index = json::parse(content(directory + "/index.json"), nullptr, false);
    if (!index.is_array() || index.empty()) {
        std::fprintf(stderr, "no index.json in %s\n", directory.c_str());
        return 2;
    }
    int failed = 0;
    auto check = [&](const std::string &what, bool right) {
        if (!right) {
            std::fprintf(stderr, "%s: FAILED\n", what.c_str());
            ++failed;
        }
    };
    std::vector<std::string> right;
    for (const json &row : index) {
        std::string name = row["file"], bytes = content(directory + "/" + name);
        if (!row["valid"]) {
            check(name + " is refused", refused(bytes));
            continue;
        }
        Save save = read(bytes);
        check(name + " is read", shown(save) == row["save"]);
        check(name + " is written", frameshard_core::write_save(save) == bytes);
        right.push_back(std::move(bytes));
    }
    std::mt19937 random(19);
    for (int i = 0; i < 1000; ++i) {
        const std::string &whole = right[size_t(i) % right.size()];
        std::string bytes = damaged(whole, &random);
        check("damaged copy " + std::to_string(i) + " is refused", bytes == whole || refused(bytes));
    }
    check("a save that is too large is refused", refused(right[0] + std::string(size_t(1) << 20, 'x')));
    std::printf("%zu saves, %d failed\n", index.size(), failed);
    return failed != 0;
}
