/* FrameshardNpc: a character with its own persona and its own conversation. */
#ifndef FRAMESHARD_GODOT_NPC_H
#define FRAMESHARD_GODOT_NPC_H

#include <memory>

#include "sidecar.h"

/* Properties that are no sampling values. */
struct NpcValues {
    std::string sidecar; // path of the node; empty: the first one that is open
    std::string persona;
    std::string conversation; // empty: the path of this node
    int64_t priority = 1;
};

class Npc {
  public:
    explicit Npc(GDExtensionObjectPtr owner) : owner_(owner) {}
    ~Npc() { stop_generation(); }

    static void add();
    static void remove();

    void process() { later_.emit(owner_); }
    void ask(const std::string &text);
    void stop_generation();
    bool is_speaking() const { return job_ != 0; }
    engine::Value save_conversation();
    bool load_conversation(const std::vector<uint8_t> &data);
    void forget();
    void changed(const Property &) {}

    NpcValues values;
    SamplingValues sampling;

  private:
    Sidecar *sidecar() const;
    /* The open session; NULL, after error_raised: there is none. */
    frameshard::Game *session();
    std::string conversation() const;
    frameshard::Listener listener();
    void check(fs_status status);

    engine::Value owner_;
    engine::Later later_;
    uint64_t job_ = 0;
    Sidecar *asked_ = nullptr;
    /* Replaced with every question, so that late events of an earlier one, and of a freed node, are not heard. */
    std::shared_ptr<int> question_;
};

#endif
