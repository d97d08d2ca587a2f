/* Tests frameshard::Game, and a close of frameshard::Client, with real sidecars: game MODEL PYTHON */
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <functional>
#include <map>
#include <string>
#include <thread>

#ifndef _WIN32
#include <sys/wait.h>
#endif

#include "frameshard.hpp"
#include "frameshard_game.hpp"

using frameshard::BudgetResult;
using frameshard::Ending;
using frameshard::Game;
using frameshard::Listener;

namespace {

int failed = 0;

void check(const char *what, bool right) {
    std::printf("%s: %s\n", what, right ? "ok" : "FAILED");
    failed += right ? 0 : 1;
}

/* Runs frames until `done` returns true, at most for a minute. Returns the largest number of events in one frame. */
template <class Done> int32_t play(Game &game, int32_t most, Done done) {
    int32_t seen = 0;
    auto until = std::chrono::steady_clock::now() + std::chrono::seconds(60);
    while (!done() && std::chrono::steady_clock::now() < until) {
        if (game.client() != nullptr) {
            fs_wait(game.client(), 0.005);
        }
        seen = std::max(seen, game.pump(most));
    }
    return seen;
}

/* Without the white space between sentences, and what Heard puts there. */
std::string letters(std::string text) {
    text.erase(std::remove_if(text.begin(), text.end(), [](char c) { return c == '|' || c == ' ' || c == '\n'; }),
               text.end());
    return text;
}

struct Heard {
    std::string text, sentences;
    Ending ending;
    int ends = 0;

    Listener listener() {
        Listener all;
        all.on_text = [this](std::string_view piece) { text.append(piece); };
        all.on_sentence = [this](std::string_view sentence) { sentences.append(sentence).append("|"); };
        all.on_end = [this](const Ending &end) {
            ending = end;
            ++ends;
        };
        return all;
    }
};

/* Closes a session with open requests. */
void close_with_requests(const fs_launch_options &launch) {
    Game game;
    int counted = 0, embedded = 0;
    auto refused = [](const fs_event &event) {
        return event.type == FS_EVENT_REFUSED && event.status == FS_CANCELLED && event.request != 0 &&
               std::string(event.text, event.text_length) == "the session was closed" && *event.detail == '\0';
    };
    game.launch(launch);
    game.count_tokens("Hello!", [&](const fs_event &event) { counted += refused(event) ? 1 : 2; });
    game.embed({"Hello!"}, [&](const fs_event &event) { embedded += refused(event) ? 1 : 2; });
    game.embed({"Hello!"}, {});
    check("leaves requests open", counted == 0 && embedded == 0);
    game.close(0);
    check("a close answers requests", counted == 1 && embedded == 1);
}

/* True if this program has started processes that it has not ended. */
bool has_children() {
#ifdef _WIN32
    return false;
#else
    return waitpid(-1, nullptr, WNOHANG) != -1;
#endif
}

/* Launches from callbacks of close(), which others call to launch. */
void launch_in_callbacks(const fs_launch_options &launch, const fs_job_options &options) {
    int ends = 0;
    {
        std::function<void()> begin; // outlives `game`, whose destructor closes
        Game game;
        begin = [&] {
            Listener listener;
            listener.on_end = [&](const Ending &) {
                ++ends;
                game.launch(launch);
                begin();
            };
            check("asks in a callback", game.ask("Hello!", options, std::move(listener)) == FS_OK);
        };
        game.launch(launch);
        begin();
        check("launches once more", game.launch(launch) == FS_OK && game.client() != nullptr);
        check("ends what the callback asked, too", ends == 2);
        game.close(0);
        check("a callback of close() may launch", ends == 3 && game.client() != nullptr);
    }
    check("leaves no sidecar behind", ends == 4 && !has_children());
}

/* A request whose answer nobody wants. */
void call_without_a_callback(Game &game) {
    int counted = 0;
    check("takes an empty callback", game.count_tokens("Hello!", {}) == FS_OK);
    game.count_tokens("Hello!", [&](const fs_event &) { ++counted; });
    play(game, 64, [&] { return counted > 0; });
    check("answers the request after it", counted == 1);
}

/* The text of an event stays valid in its callback, which must not poll. */
void pump_in_a_callback(Game &game, const fs_job_options &options) {
    Heard heard;
    Listener pumps = heard.listener();
    int32_t handled = 0;
    pumps.on_text = [&](std::string_view piece) {
        handled += game.pump(64);
        heard.text.append(piece);
    };
    game.ask("Tell me about the sea.", options, std::move(pumps));
    play(game, 64, [&] { return heard.ends > 0; });
    check("handles nothing in a callback", handled == 0 && heard.ends == 1 && heard.ending.text == heard.text);
}

void report_frame_times(Game &game) {
    fs_status refused = FS_OK;
    std::string reason;
    game.on_event = [&](const fs_event &event) {
        if (event.type == FS_EVENT_REFUSED) {
            refused = event.status;
            reason.assign(event.text, event.text_length);
        }
    };
    game.keep_out_of_frames(20);
    play(game, 64, [&] { return refused != FS_OK; });
    check("refuses a frame time out of range",
          refused == FS_BAD_ARGUMENT && reason.find("target_frame_s") != std::string::npos);
    game.keep_out_of_frames(1.0 / 60);
    game.on_event = nullptr;
}

/* A handler of frameshard::Client::poll may close the client. */
void close_in_a_handler(const fs_launch_options &options) {
    frameshard::LaunchOptions launch;
    static_cast<fs_launch_options &>(launch) = options;
    frameshard::Client client = frameshard::Client::launch(launch);
    int32_t handled = 0;
    while (client.get() != nullptr) {
        client.wait(0.1);
        handled += client.poll([&](const frameshard::Event &) { client.close(); });
    }
    check("handles no event after a close", handled == 1 && client.poll([](const frameshard::Event &) {}) == 0);
    try {
        client.ask("Hello!");
        check("refuses to ask a closed client", false);
    } catch (const frameshard::Error &error) {
        check("says that the client is closed", error.status() == FS_CONNECTION_LOST);
    }
}

} // namespace

int main(int argc, char **argv) {
    if (argc < 3) {
        return 2;
    }
    fs_launch_options launch;
    fs_launch_options_init(&launch, sizeof launch);
    launch.model = argv[1];
    launch.python = argv[2];
    launch.device = "emulated";
    launch.n_threads = 1;
    fs_job_options options;
    fs_job_options_init(&options, sizeof options);
    fs_sampling sampling;
    fs_sampling_init(&sampling, sizeof sampling);
    sampling.temperature = 0;
    sampling.max_tokens = 48;
    options.sampling = &sampling;

    Game game;
    bool ready = false;
    uint64_t full = 0, floor = 0;
    fs_status closed = FS_OK;
    game.on_ready = [&](const fs_model &model) {
        ready = true;
        full = model.full_bytes;
        floor = model.floor_bytes;
    };
    game.on_closed = [&](fs_status status, std::string_view) { closed = status; };
    game.keep_out_of_frames(1.0 / 60);
    check("launches", game.launch(launch) == FS_OK);

    Heard first;
    check("asks before it is ready", game.ask("Tell me about the sea.", options, first.listener()) == FS_OK);
    int32_t most = play(game, 1, [&] { return first.ends > 0; });
    check("is ready", ready && game.is_ready() && full > 0);
    check("hands out one event a frame where told so", most == 1);
    check("ends an answer once", first.ends == 1 && first.ending.status == FS_OK);
    check("gives the whole text", !first.text.empty() && first.ending.text == first.text);
    check("gives all of it in sentences", letters(first.sentences) == letters(first.text) &&
                                              !letters(first.text).empty() && first.sentences.back() == '|');

    BudgetResult shrunk, refused;
    int budgets = 0;
    game.set_budget((floor + full) / 2, 5, [&](const BudgetResult &result) { shrunk = result, ++budgets; });
    game.set_budget(1, 5, [&](const BudgetResult &result) { refused = result, ++budgets; });
    play(game, 64, [&] { return budgets == 2; });
    check("shrinks", shrunk.status == FS_OK && shrunk.used_bytes <= (floor + full) / 2);
    check("is refused below the floor", refused.status == FS_BUDGET_BELOW_FLOOR && refused.floor_bytes > 1);

    call_without_a_callback(game);
    pump_in_a_callback(game, options);
    report_frame_times(game);

    Heard second;
    sampling.max_tokens = 800;
    uint64_t job = 0;
    game.ask("Count as far as you can.", options, second.listener(), &job);
    play(game, 64, [&] { return !second.text.empty(); });
    check("cancels", game.cancel(job) == FS_OK);
    play(game, 64, [&] { return second.ends > 0; });
    check("says that it was cancelled", second.ends == 1 && second.ending.status == FS_CANCELLED);

    Heard calls, answer;
    std::string said_by_call;
    Listener does = calls.listener();
    does.on_tool_call = [&](const frameshard::ToolCall &call) { said_by_call = call.name + call.arguments; };
    does.on_end = [&](const Ending &end) {
        calls.ending = end;
        std::map<std::string, std::string> results;
        for (const frameshard::ToolCall &call : end.tool_calls) {
            results[call.call_id] = "2 gold";
        }
        fs_job_options plain = options;
        plain.tools = nullptr;
        plain.n_tools = 0;
        plain.tool_choice = nullptr;
        check("takes results in on_end", game.tool_results(results, plain, answer.listener()) == FS_OK);
    };
    fs_tool price = {"price", "The price of an item.",
                     R"({"type": "object", "properties": {"item": {"enum": ["ale"]}}, "required": ["item"]})"};
    sampling.max_tokens = 48;
    options.conversation = "mira";
    options.tools = &price;
    options.n_tools = 1;
    options.tool_choice = "price";
    game.ask("What is ale?", options, std::move(does));
    play(game, 64, [&] { return answer.ends > 0; });
    said_by_call.erase(std::remove(said_by_call.begin(), said_by_call.end(), ' '), said_by_call.end());
    check("tells of a call", !calls.ending.tool_calls.empty() && said_by_call == R"(price{"item":"ale"})");
    check("goes on with its result", answer.ending.status == FS_OK && !answer.text.empty());
    options.conversation = nullptr;
    options.tools = nullptr;
    options.n_tools = 0;
    options.tool_choice = nullptr;

    Heard third;
    Listener closes = third.listener();
    closes.on_text = [&](std::string_view) { game.close(3); };
    game.ask("Hello!", options, std::move(closes));
    play(game, 64, [&] { return game.client() == nullptr; });
    check("may be closed by a callback", third.ends == 1 && third.ending.status == FS_CANCELLED);
    check("is closed", game.client() == nullptr && !game.is_ready() && game.pump(64) == 0);
    check("refuses to ask then", game.ask("Hello?", options, {}) != FS_OK);
    check("and does not call that an accident", closed == FS_OK);

    launch.model = "no/such/model.gguf";
    check("launches again", game.launch(launch) == FS_OK);
    Heard fourth;
    game.ask("Hello!", options, fourth.listener());
    play(game, 64, [&] { return closed != FS_OK; });
    check("says why there is no sidecar", closed == FS_MODEL_NOT_FOUND && game.client() == nullptr);
    check("ends what was asked", fourth.ends == 1 && fourth.ending.status == FS_MODEL_NOT_FOUND);
    game.close(0); // before the listeners are destroyed

    close_in_a_handler(launch);
    close_with_requests(launch);
    launch_in_callbacks(launch, options);
    return failed != 0;
}
