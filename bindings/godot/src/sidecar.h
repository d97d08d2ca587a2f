/* FrameshardSidecar: owns the sidecar's process. Nothing in it waits; answers and news come in _process. */
#ifndef FRAMESHARD_GODOT_SIDECAR_H
#define FRAMESHARD_GODOT_SIDECAR_H

#include <memory>
#include <optional>

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
    struct Lease {
        double vram_budget_mb;
        std::string state;
        bool operator==(const Lease &other) const {
            return vram_budget_mb == other.vram_budget_mb && state == other.state;
        }
    };
    void propose(const Lease &lease, int64_t host_budget_bytes = -1); // -1: it stays
    void propose_host_budget();
    void tell_frames();
    void set_pacing();
    void emit(const char *signal, std::vector<engine::Value> arguments);

    engine::Value owner_;
    std::shared_ptr<frameshard::Game> game_ = std::make_shared<frameshard::Game>();
    bool entered_ = false;
    engine::Later later_;
    /* Empty after connect_to: the lease is that of another client. */
    std::optional<Lease> in_force_, proposed_;
};

/* Has a node emit error_raised in its next frame, because the game may not listen yet. */
void raise_later(engine::Later &later, fs_status status, const std::string &message);
std::string last_error();

#endif
