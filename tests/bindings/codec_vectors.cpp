/* Checks the C client's codec with bindings/vectors: codec_vectors DIRECTORY. It uses no socket. */
#include <cstdio>
#include <fstream>
#include <iterator>

#include "codec.h"

using frameshard_core::json;

namespace {

std::string content(const std::string &path) {
    std::ifstream file(path, std::ios::binary);
    return {std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
}

/* Replaces binaries by maps with their base64 text, as in the index of the vectors. */
json shown(const json &value) {
    if (value.is_binary()) {
        static const char digits[] = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
        std::string text;
        const auto &bytes = value.get_binary();
        for (size_t at = 0; at < bytes.size(); at += 3) {
            uint32_t word = 0;
            for (size_t i = 0; i < 3; ++i) {
                word = word << 8 | (at + i < bytes.size() ? bytes[at + i] : 0);
            }
            for (size_t i = 0; i < 4; ++i) {
                text += at + i <= bytes.size() ? digits[word >> (18 - 6 * i) & 63] : '=';
            }
        }
        return {{"base64", text}};
    }
    json copy = value;
    for (json &item : copy) {
        if (item.is_structured() || item.is_binary()) {
            item = shown(item);
        }
    }
    return copy;
}

/* Checks one vector. Returns what the codec does wrong; "" if nothing. */
std::string judge(const json &row, const std::string &frame) {
    json message, again;
    std::string why;
    const std::string &name = row["file"].get_ref<const std::string &>();
    bool is_frame = frameshard_core::decode_frame(frame.data(), frame.size(), &message, &why);
    if (is_frame != (row["valid"].get<bool>() || name.rfind("invalid-frame-", 0) != 0)) {
        return is_frame ? "taken for a frame" : "not taken for a frame: " + why;
    }
    if (!row["valid"]) {
        return ""; // the sidecar refuses wrong requests; the client library does not check them
    }
    bool is_answer = frameshard_core::decode_answer(frame.data(), frame.size(), &again, &why);
    if (row["from"] == "broker") {
        if (!is_answer) {
            return "not taken for an answer: " + why;
        }
        json kept = shown(again);
        if (kept["t"] == "") {
            kept.erase("t"); // "" stands for a message that this version does not know
        }
        if (kept != row.value("known", row["message"])) {
            return "kept of it is " + kept.dump();
        }
    } else if (is_answer && again["t"] != "") {
        return "taken for an answer";
    }
    if (shown(message) != row["message"]) {
        return "read as " + message.dump();
    }
    std::string written = frameshard_core::encode(message);
    if (!frameshard_core::decode_frame(written.data(), written.size(), &again, &why) || again != message) {
        return "does not survive being written";
    }
    return "";
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
    for (const json &row : index) {
        std::string name = row["file"];
        std::string wrong = judge(row, content(directory + "/" + name));
        if (!wrong.empty()) {
            std::fprintf(stderr, "%s: %s\n", name.c_str(), wrong.c_str());
            ++failed;
        }
    }
    std::printf("%zu vectors, %d failed\n", index.size(), failed);
    return failed != 0;
}
