#include "sidecar.h"

#include <algorithm>
#include <filesystem>
#include <fstream>

#include "properties.h"

namespace {

using engine::Value;

constexpr double MIB = 1048576;
constexpr double RELEASE_TIMEOUT_S = 10;

void *create(GDExtensionObjectPtr owner) { return new Sidecar(owner); }
void destroy(void *instance) { delete static_cast<Sidecar *>(instance); }
void enter_tree(void *instance) { static_cast<Sidecar *>(instance)->enter_tree(); }
void process(void *instance) { static_cast<Sidecar *>(instance)->process(); }
const engine::Class TYPE = {"FrameshardSidecar", create, destroy, enter_tree, process};

const Property PROPERTIES[] = {
    {"launch_at_start", Kind::boolean, offsetof(SidecarValues, launch_at_start), 0, ""},
    {"target_frame_rate", Kind::number, offsetof(SidecarValues, target_frame_rate), 1, "0,1000,1"},
    {"scheduling", Kind::text, offsetof(SidecarValues, scheduling), 2,
     "prioritize_graphics,balance,prioritize_compute"},
    {"events_per_frame", Kind::integer, offsetof(SidecarValues, events_per_frame), 1, "1,4096,1"},
};

std::vector<Sidecar *> &living() {
    static std::vector<Sidecar *> sidecars;
    return sidecars;
}

/* The word for a number of frameshard.h; "" for one that is not known. */
template <size_t N> const char *word(const char *const (&words)[N], uint64_t number) {
    return number >= 1 && number <= N ? words[number - 1] : "";
}

/* The number of a word; 0: it is not known. */
template <size_t N> int32_t number(const char *const (&words)[N], const std::string &wanted) {
    const auto *found = std::find(std::begin(words), std::end(words), wanted);
    return found == std::end(words) ? 0 : int32_t(found - std::begin(words)) + 1;
}

std::string folder_of_game() { return engine::singleton("OS").call("get_executable_path").call("get_base_dir").text(); }

/* The sidecar of a bundle in the folder `frameshard` beside the game; "" if there is none. */
std::string built_in() {
    for (const char *name : {"pythonw.exe", "python"}) {
        const std::string path = folder_of_game() + "/frameshard/sidecar/" + name;
        if (std::ifstream(std::filesystem::u8path(path)).good()) {
            return path;
        }
    }
    return "";
}

} // namespace

std::string plain_path(const std::string &path) {
    const std::string resources = "res://";
    if (path.compare(0, resources.size(), resources) == 0 &&
        !engine::singleton("OS").call("has_feature", {"editor"}).boolean()) {
        return folder_of_game() + "/" + path.substr(resources.size()); // the sidecar cannot read the game's pack
    }
    return engine::singleton("ProjectSettings").call("globalize_path", {std::string_view(path)}).text();
}

std::string last_error() {
    uint32_t length = 0;
    const char *text = fs_last_error(&length);
    return std::string(text, length);
}

void raise_later(engine::Later &later, fs_status status, const std::string &message) {
    later.add("error_raised", {fs_status_name(status), std::string_view(message)});
}

Sidecar::Sidecar(GDExtensionObjectPtr owner) : owner_(owner) {
    living().push_back(this);
    game_->on_ready = [this](const fs_model &model) {
        set_pacing();
        emit("model_ready", {model.name, double(model.floor_bytes) / MIB, double(model.full_bytes) / MIB});
    };
    game_->on_event = [this](const fs_event &event) { hear(event); };
    game_->on_closed = [this](fs_status status, std::string_view message) {
        Sidecar *const self = this; // a listener may free the node, and this function with it
        if (status != FS_OK) {
            self->emit("error_raised", {fs_status_name(status), message});
        }
        if (is_alive(self)) {
            self->emit("closed", {});
        }
    };
}

Sidecar::~Sidecar() {
    living().erase(std::find(living().begin(), living().end(), this));
    game_->on_ready = nullptr;
    game_->on_event = nullptr;
    game_->on_closed = nullptr;
    game_->close(0);
}

Sidecar *Sidecar::any() {
    const auto open = std::find_if(living().begin(), living().end(), [](Sidecar *one) { return one->open(); });
    return open != living().end() ? *open : living().empty() ? nullptr : living().front();
}

bool Sidecar::is_alive(const Sidecar *sidecar) {
    return std::find(living().begin(), living().end(), sidecar) != living().end();
}

void Sidecar::enter_tree() {
    if (!std::exchange(entered_, true) && values.launch_at_start) {
        launch();
    }
}

void Sidecar::process() {
    const auto game = game_; // a signal may free this node
    const int64_t most = std::clamp<int64_t>(values.events_per_frame, 1, INT32_MAX);
    later_.emit(owner_);
    game->pump(int32_t(most));
}

void Sidecar::launch() {
    Texts texts;
    fs_launch_options made;
    fs_launch_options_init(&made, sizeof made);
    fill(made, options, texts);
    if (options.python.empty()) {
        made.python = texts.text(built_in());
    }
    made.client_name = "godot";
    begin(game_->launch(made));
    in_force_ = proposed_ = Lease{options.vram_budget_mb, "active"};
}

void Sidecar::connect(const std::string &connect_file) {
    begin(game_->connect(plain_path(connect_file).c_str(), "godot"));
    in_force_ = proposed_ = std::nullopt;
}

void Sidecar::begin(fs_status status) {
    if (status == FS_OK) {
        tell_frames();
    } else {
        raise_later(later_, status, last_error());
    }
}

void Sidecar::tell_frames() {
    game_->keep_out_of_frames(values.target_frame_rate != 0 ? 1 / values.target_frame_rate : 0);
}

void Sidecar::set_pacing() {
    const fs_status status = fs_set_pacing(game_->client(), number(SchedulingMode, values.scheduling), 0, nullptr);
    if (status != FS_OK) {
        raise_later(later_, status, last_error());
    }
}

void Sidecar::close() {
    if (open() != nullptr) {
        later_.add("closed", {});
    }
    game_->close(0);
}

void Sidecar::set_lease(double vram_budget_mb, const std::string &state) { propose({vram_budget_mb, state}); }

void Sidecar::propose(const Lease &lease, int64_t host_budget_bytes) {
    if (open() == nullptr) {
        raise_later(later_, FS_CONNECTION_LOST, "there is no open sidecar: call launch() first");
        return;
    }
    fs_lease made;
    fs_lease_init(&made, sizeof made);
    made.vram_budget_bytes = bytes_of(lease.vram_budget_mb);
    made.timeout_s = RELEASE_TIMEOUT_S;
    made.state = number(LeaseState, lease.state);
    made.host_budget_bytes = host_budget_bytes;
    const fs_status status = game_->set_lease(made, [this, lease](const frameshard::BudgetResult &result) {
        if (result.status == FS_OK || result.status == FS_DEADLINE_MISSED) { // a late release stays in force
            in_force_ = lease;
        } else if (proposed_ == lease) {
            proposed_ = in_force_;
        }
        if (result.status == FS_OK) {
            emit("budget_released", {double(result.budget_bytes) / MIB, double(result.used_bytes) / MIB});
        } else if (result.status != FS_CANCELLED) {
            emit("error_raised", {fs_status_name(result.status), std::string_view(result.message)});
        }
    });
    if (status == FS_OK) {
        proposed_ = lease;
    } else {
        raise_later(later_, status, last_error());
    }
}

void Sidecar::propose_host_budget() {
    if (proposed_) {
        propose(*proposed_, int64_t(bytes_of(options.host_budget_mb)));
    } else { // a lease has a VRAM budget, too
        raise_later(later_, FS_BAD_ARGUMENT,
                    "the VRAM budget of the sidecar that another program has launched is not known: call set_lease() "
                    "before host_budget_mb changes");
    }
}

void Sidecar::changed(const Property &property) {
    if (open() == nullptr) {
        return;
    }
    const std::string name(property.name);
    if (name == "vram_budget_mb") {
        propose({options.vram_budget_mb, proposed_ ? proposed_->state : "active"});
    } else if (name == "host_budget_mb") {
        propose_host_budget();
    } else if (name == "target_frame_rate") {
        tell_frames();
    } else if (name == "scheduling") {
        set_pacing();
    }
}

void Sidecar::hear(const fs_event &event) {
    const std::string_view text(event.text, event.text_length);
    if (event.type == FS_EVENT_NOTICE) {
        emit("notice_received", {word(NoticeKind, event.notice), text, double(event.budget_bytes) / MIB});
    } else if (event.type == FS_EVENT_LOADING) {
        emit("loading_updated", {word(LoadingStage, event.stage), int64_t(event.done), int64_t(event.total)});
    } else if (event.type == FS_EVENT_ENGINE) {
        emit("engine_changed", {word(EngineState, event.engine_state), int64_t(event.restarts), text});
    } else if (event.type == FS_EVENT_REFUSED) {
        emit("error_raised", {fs_status_name(event.status), text});
    }
}

void Sidecar::emit(const char *signal, std::vector<Value> arguments) {
    const Value owner = owner_; // a listener may free this node
    arguments.insert(arguments.begin(), Value(signal));
    owner.call("emit_signal", arguments);
}

void Sidecar::add() {
    constexpr auto STRING = GDEXTENSION_VARIANT_TYPE_STRING;
    constexpr auto FLOAT = GDEXTENSION_VARIANT_TYPE_FLOAT;
    constexpr auto INT = GDEXTENSION_VARIANT_TYPE_INT;
    engine::add(TYPE);
    for (const Property &property : PROPERTIES) {
        add_property<Sidecar, &Sidecar::values>(TYPE, property);
    }
    for (const Property &property : LAUNCH_PROPERTIES) {
        add_property<Sidecar, &Sidecar::options>(TYPE, property);
    }
    using Arguments = const std::vector<Value> &;
    auto method = [](const char *name, std::vector<engine::Argument> arguments, GDExtensionVariantType result,
                     Value (*call)(void *, const void *, Arguments)) {
        engine::add(TYPE, engine::Method{name, std::move(arguments), result, call, nullptr});
    };
    constexpr auto NOTHING = GDEXTENSION_VARIANT_TYPE_NIL;
    method("launch", {}, NOTHING,
           [](void *self, const void *, Arguments) { return static_cast<Sidecar *>(self)->launch(), Value(); });
    method("connect_to", {{"connect_file", STRING}}, NOTHING, [](void *self, const void *, Arguments given) {
        return static_cast<Sidecar *>(self)->connect(given[0].text()), Value();
    });
    method("close", {}, NOTHING,
           [](void *self, const void *, Arguments) { return static_cast<Sidecar *>(self)->close(), Value(); });
    method("set_lease", {{"vram_budget_mb", FLOAT}, {"state", STRING}}, NOTHING,
           [](void *self, const void *, Arguments given) {
               return static_cast<Sidecar *>(self)->set_lease(given[0].number(), given[1].text()), Value();
           });
    method("is_model_ready", {}, GDEXTENSION_VARIANT_TYPE_BOOL, [](void *self, const void *, Arguments) {
        const auto *game = static_cast<Sidecar *>(self)->open();
        return Value(game != nullptr && game->is_ready());
    });
    engine::add(TYPE, engine::Signal{"model_ready", {{"model", STRING}, {"floor_mb", FLOAT}, {"full_mb", FLOAT}}});
    engine::add(TYPE, engine::Signal{"budget_released", {{"budget_mb", FLOAT}, {"used_mb", FLOAT}}});
    engine::add(TYPE, engine::Signal{"notice_received", {{"kind", STRING}, {"text", STRING}, {"budget_mb", FLOAT}}});
    engine::add(TYPE, engine::Signal{"loading_updated", {{"stage", STRING}, {"done", INT}, {"total", INT}}});
    engine::add(TYPE, engine::Signal{"engine_changed", {{"state", STRING}, {"restarts", INT}, {"text", STRING}}});
    engine::add(TYPE, engine::Signal{"error_raised", {{"name", STRING}, {"message", STRING}}});
    engine::add(TYPE, engine::Signal{"closed", {}});
}

void Sidecar::remove() { engine::remove(TYPE); }
