#include "npc.h"

#include "properties.h"

namespace {

using engine::Value;

void *create(GDExtensionObjectPtr owner) { return new Npc(owner); }
void destroy(void *instance) { delete static_cast<Npc *>(instance); }
void process(void *instance) { static_cast<Npc *>(instance)->process(); }
const engine::Class TYPE = {"FrameshardNpc", create, destroy, nullptr, process};

const Property PROPERTIES[] = {
    {"sidecar", Kind::text, offsetof(NpcValues, sidecar), 0, ""},
    {"persona", Kind::text, offsetof(NpcValues, persona), 18, ""}, // a text of several lines
    {"conversation", Kind::text, offsetof(NpcValues, conversation), 0, ""},
    {"priority", Kind::integer, offsetof(NpcValues, priority), 1, "0,2,1"},
};

/* A copy of the node, because a listener may free the character. */
void emit(Value node, const char *signal, const std::vector<Value> &arguments) {
    std::vector<Value> all = {signal};
    all.insert(all.end(), arguments.begin(), arguments.end());
    node.call("emit_signal", all);
}

} // namespace

Sidecar *Npc::sidecar() const {
    if (values.sidecar.empty()) {
        return Sidecar::any();
    }
    const Value node = owner_.call("get_node_or_null", {std::string_view(values.sidecar)});
    auto *found = static_cast<Sidecar *>(engine::instance_of(node.object()));
    return Sidecar::is_alive(found) ? found : nullptr; // another node of this extension is none
}

frameshard::Game *Npc::session() {
    Sidecar *found = sidecar();
    frameshard::Game *game = found != nullptr ? found->open() : nullptr;
    if (game == nullptr) {
        raise_later(later_, FS_CONNECTION_LOST, "there is no open FrameshardSidecar in the scene");
    }
    return game;
}

std::string Npc::conversation() const {
    if (!values.conversation.empty()) {
        return values.conversation;
    }
    const bool has_path = owner_.call("is_inside_tree").boolean();
    return owner_.call(has_path ? "get_path" : "get_name").text(); // names are unique only among siblings
}

void Npc::check(fs_status status) {
    if (status != FS_OK) {
        raise_later(later_, status, last_error());
    }
}

void Npc::ask(const std::string &text) {
    stop_generation();
    frameshard::Game *game = session();
    if (game == nullptr) {
        return;
    }
    Texts texts;
    fs_sampling sampled;
    fs_sampling_init(&sampled, sizeof sampled);
    fill(sampled, sampling, texts);
    fs_job_options options;
    fs_job_options_init(&options, sizeof options);
    options.conversation = texts.text(conversation());
    options.system = texts.text(values.persona);
    options.sampling = &sampled;
    options.priority = saturated<uint32_t>(values.priority);
    asked_ = sidecar();
    question_ = std::make_shared<int>();
    uint64_t job = 0;
    const fs_status status = game->ask(text, options, listener(), &job);
    job_ = status == FS_OK ? job : 0;
    check(status);
}

frameshard::Listener Npc::listener() {
    frameshard::Listener made;
    const std::weak_ptr<int> question = question_;
    made.on_text = [this, question](std::string_view delta) {
        if (!question.expired()) {
            emit(owner_, "response_updated", {delta});
        }
    };
    made.on_sentence = [this, question](std::string_view sentence) {
        if (!question.expired()) {
            emit(owner_, "sentence_finished", {sentence});
        }
    };
    made.on_end = [this, question](const frameshard::Ending &ending) {
        if (question.expired()) {
            return;
        }
        job_ = 0;
        if (ending.status == FS_OK) {
            emit(owner_, "response_finished", {std::string_view(ending.text)});
        } else {
            emit(owner_, "error_raised", {fs_status_name(ending.status), std::string_view(ending.message)});
        }
    };
    return made;
}

void Npc::stop_generation() {
    question_.reset();
    const uint64_t job = std::exchange(job_, 0);
    if (job != 0 && Sidecar::is_alive(asked_) && asked_->open() != nullptr) {
        asked_->open()->cancel(job);
    }
}

Value Npc::save_conversation() {
    const void *data = nullptr;
    uint64_t size = 0;
    if (frameshard::Game *game = session()) {
        check(fs_save(game->client(), conversation().c_str(), &data, &size));
    }
    return Value::bytes(data, size);
}

bool Npc::load_conversation(const std::vector<uint8_t> &data) {
    frameshard::Game *game = session();
    if (game == nullptr) {
        return false;
    }
    const fs_status status = fs_load(game->client(), data.data(), data.size(), conversation().c_str(), nullptr);
    check(status);
    return status == FS_OK;
}

void Npc::forget() {
    if (frameshard::Game *game = session()) {
        check(fs_forget(game->client(), conversation().c_str()));
    }
}

void Npc::add() {
    constexpr auto STRING = GDEXTENSION_VARIANT_TYPE_STRING;
    constexpr auto BOOL = GDEXTENSION_VARIANT_TYPE_BOOL;
    constexpr auto BYTES = GDEXTENSION_VARIANT_TYPE_PACKED_BYTE_ARRAY;
    engine::add(TYPE);
    for (const Property &property : PROPERTIES) {
        add_property<Npc, &Npc::values>(TYPE, property);
    }
    for (const Property &property : SAMPLING_PROPERTIES) {
        add_property<Npc, &Npc::sampling>(TYPE, property);
    }
    using Arguments = const std::vector<Value> &;
    auto method = [](const char *name, std::vector<engine::Argument> arguments, GDExtensionVariantType result,
                     Value (*call)(void *, const void *, Arguments)) {
        engine::add(TYPE, engine::Method{name, std::move(arguments), result, call, nullptr});
    };
    constexpr auto NOTHING = GDEXTENSION_VARIANT_TYPE_NIL;
    method("ask", {{"text", STRING}}, NOTHING, [](void *self, const void *, Arguments given) {
        return static_cast<Npc *>(self)->ask(given[0].text()), Value();
    });
    method("stop_generation", {}, NOTHING,
           [](void *self, const void *, Arguments) { return static_cast<Npc *>(self)->stop_generation(), Value(); });
    method("is_speaking", {}, BOOL,
           [](void *self, const void *, Arguments) { return Value(static_cast<Npc *>(self)->is_speaking()); });
    method("save_conversation", {}, BYTES,
           [](void *self, const void *, Arguments) { return static_cast<Npc *>(self)->save_conversation(); });
    method("load_conversation", {{"data", BYTES}}, BOOL, [](void *self, const void *, Arguments given) {
        return Value(static_cast<Npc *>(self)->load_conversation(given[0].bytes()));
    });
    method("forget", {}, NOTHING,
           [](void *self, const void *, Arguments) { return static_cast<Npc *>(self)->forget(), Value(); });
    engine::add(TYPE, engine::Signal{"response_updated", {{"delta", STRING}}});
    engine::add(TYPE, engine::Signal{"sentence_finished", {{"sentence", STRING}}});
    engine::add(TYPE, engine::Signal{"response_finished", {{"text", STRING}}});
    engine::add(TYPE, engine::Signal{"error_raised", {{"name", STRING}, {"message", STRING}}});
}

void Npc::remove() { engine::remove(TYPE); }
