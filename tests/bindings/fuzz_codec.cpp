/* A libFuzzer target for the C client, run by `make fuzz` with bindings/vectors as first inputs. It feeds bytes as if
 * they came from a sidecar. The codec must refuse them, or decode a message that is the same after encoding and
 * decoding it again. A session with open jobs must continue, or end with FS_EVENT_CLOSED as its last event. */
#include <cstdlib>

#include "session.h"

using frameshard_core::Event;
using frameshard_core::json;
using frameshard_core::Session;

namespace {

/* Epoch and session of the vectors. */
constexpr uint64_t kEpoch = (uint64_t(1) << 53) - 1, kSession = 4711;

void expect(bool held) {
    if (!held) {
        std::abort();
    }
}

void hear(Session &session, const json &message) {
    std::string frame = frameshard_core::encode(message);
    session.receive(frame.data(), frame.size());
}

/* Passes the bytes to a session with open jobs and requests, whose numbers are those in the vectors. */
void play(const char *data, size_t size) {
    Session session("fuzz");
    session.greet(kEpoch);
    hear(session,
         {{"t", "welcome"},
          {"id", 1},
          {"epoch", kEpoch},
          {"protocol", frameshard_core::kProtocol},
          {"session", kSession},
          {"resumed", false},
          {"server", "fuzz"},
          {"limits",
           {{"message_bytes", 1 << 20}, {"string_bytes", 1 << 16}, {"jobs", 64}, {"window", 256}, {"silent_s", 10}}},
          {"engine", "ready"},
          {"model", nullptr}});
    for (int i = 0; i < 8; ++i) {
        session.submit({{"kind", "completion"}, {"prompt", "x"}, {"window", 4}});
    }
    for (const char *name : {"budget_set", "budget_set", "budget_get", "stats", "plan", "caps_and_requirements"}) {
        session.request({{"t", name}});
    }
    session.receive(data, size);
    session.receive(data, size);
    session.beat();
    int closed = 0;
    auto drain = [&] {
        while (session.has_event()) {
            Event event = session.take();
            expect(frameshard_core::is_utf8(event.text.data(), event.text.size()));
            expect(closed == 0);
            closed += event.fields.type == FS_EVENT_CLOSED;
        }
    };
    drain();
    session.lose({FS_CONNECTION_LOST, "the end", json::object()});
    drain();
    expect(closed == 1);
}

} // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t size) {
    const char *data = reinterpret_cast<const char *>(bytes);
    json message, again;
    std::string why;
    if (frameshard_core::decode_frame(data, size, &message, &why)) {
        std::string text = frameshard_core::to_text(message);
        bool binary = text.find("\"bytes\"") != std::string::npos; // encode() does not write binaries
        std::string written = frameshard_core::encode(message);
        expect(binary ||
               (frameshard_core::decode_frame(written.data(), written.size(), &again, &why) && again == message));
        play(data, size);
    } else {
        expect(!why.empty()); // play() is slow and would only show that the session ends
    }
    return 0;
}
