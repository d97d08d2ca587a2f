/* FrameshardSidecar: owns the sidecar's process. Nothing in it waits; answers and news come in _process. */
#ifndef FRAMESHARD_GODOT_SIDECAR_H
#define FRAMESHARD_GODOT_SIDECAR_H

#include <memory>

#include <frameshard_game.hpp>

#include "engine.h"
#include "options.h"

/* Properties that are no options of a launch. */
struct SidecarValues {
    bool launch_at_start = true;
    double target_frame_rate = 60; // 0: frames are not considered
    std::string scheduling = "balance";
    int64_t events_per_frame = 64;
};

class Sidecar {
  public:
    explicit Sidecar(GDExtensionObjectPtr owner);
    ~Sidecar();

    static void add();
    static void remove();
    /* The one that was made first, of those that are open if any is; NULL: there is none. */
    static Sidecar *any();
    static bool is_alive(const Sidecar *sidecar);

    void enter_tree();
    void process();
    void launch();
    void connect(const std::string &connect_file);
    void close();
    void set_lease(double vram_budget_mb, const std::string &state);
    void changed(const Property &property);
    /* NULL: closed. */
    frameshard::Game *open() const { return game_->client() != nullptr ? game_.get() : nullptr; }

    LaunchValues options;
    SidecarValues values;

  private:
    void hear(const fs_event &event);
    void begin(fs_status status);
    void propose(double vram_budget_mb, const std::string &state, int64_t host_budget_bytes); // -1: it stays
    void tell_frames();
    void set_pacing();
    void emit(const char *signal, std::vector<engine::Value> arguments);
    /* After the call of the game that is going on, in which it may not listen yet. */
    void raise_later(fs_status status, const std::string &message);

    engine::Value owner_;
    std::shared_ptr<frameshard::Game> game_ = std::make_shared<frameshard::Game>();
    bool entered_ = false;
};

/* Emits error_raised at the end of the frame. */
void raise_later(const engine::Value &node, fs_status status, const std::string &message);
std::string last_error();

#endif
