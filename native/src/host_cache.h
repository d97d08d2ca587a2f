// Weights in host memory, where the host budget has no room for all of them.
//
// Until then, and on systems that cannot do better, weights are the mapping of the model file. From open() on, a part of them
// is held (HeldWeights). Graphs go through weights in the same order again and again, so the latest ones are the last to be
// needed: what is held is therefore a prefix of the ladder, behind what is resident in VRAM, and never what was used last.
// The other weights are read ahead of use into a buffer (ReadAhead), and copied to the device from there. PIPO
// (arXiv 2504.03664) overlaps disk, link and computing in this way.
//
// Of experts a graph needs only those that its routers choose: what room the other weights leave has single experts
// (HostExperts). What was not held and is read through the mapping all the same, as llama.cpp does with rows of the embedding,
// comes from the system's cache of files, and is dropped from there now and then.
//
// Needs the graph mutex but for what is marked [any thread].
#pragma once

#include "held_weights.h"
#include "host_experts.h"
#include "read_ahead.h"
#include "weights.h"

namespace fsd {

class HostCache {
  public:
    HostCache(Inner &inner, const Weights &weights, const ExpertCache &counts)
        : inner_(inner), weights_(weights), ahead_(inner), experts_(inner, counts) {}
    ~HostCache() { close(); }
    HostCache(const HostCache &) = delete;
    HostCache &operator=(const HostCache &) = delete;

    // Remembers the file that a window on weights is of; to be called before anything changes its pages.
    void add(char *window, size_t bytes);
    // llama.cpp has loaded the model, and unmapped what is not of it: most of a pak file. Returns the bytes of the mapping
    // around a window that are left; those of the window if it is not of a file. Not once the cache is open.
    uint64_t narrow(const char *window);
    // The mapping goes away, with all that is held in it. Waits for reads under way.
    void close();
    void set_script(const DiskScript &script) { script_ = script; }

    // Finds what floor() is, once the weights are laid out.
    void plan();
    // [any thread] The least host memory for weights. 0: weights cannot be held in part, because the system cannot do it, or
    // weights are not a file's, or the model is so small that it saves nothing.
    uint64_t floor() const { return floor_.load(); }
    // From now on the cache has weights, and at first holds none of them. Needs a floor.
    void open();
    bool is_open() const { return open_.load(); } // [any thread]
    // [any thread] Host memory that it has.
    uint64_t used() const { return held_.bytes() + ahead_.bytes() + experts_.bytes() + embedding_bytes_.load(); }
    // Divides `room` between the buffer, weights that are held, of which the first `n_resident` slabs need none, and single
    // experts. What is too much is freed at once, but for reads under way; the rest is read by and by. Returns whether what
    // the CPU may compute has changed.
    bool set_room(uint64_t room, size_t n_resident);
    // Weights that are held may have become more. Returns whether what the CPU may compute has changed.
    bool adopt();
    // Frees the buffer, until set_room() is called. The streams go away.
    void rest();
    // Whether set_room() would find more room now for the same: reads had memory that may be free by now, there is no buffer
    // yet, or what was to be held could not be read.
    bool is_settling() const { return settling_ || ahead_.size() == 0 || held_.lacks(); }
    // Whether all of a shard that is not resident can be read in host memory, by the CPU too.
    bool holds_shard(uint32_t shard) const { return !is_open() || held_of_[shard] == Part::all; }
    // The same for so many matrices of single experts at once, and for what else is in the shard.
    bool serves_experts(uint32_t shard, size_t n_matrices) const {
        return !is_open() || (held_of_[shard] != Part::some && n_matrices <= experts_.most_slots());
    }
    // Whether the experts of a piece have to be taken one by one from experts(). Otherwise they are where at() says.
    bool takes_singly(int piece) const { return is_open() && experts_.has(piece); }
    HostExperts &experts() { return experts_; }

    // Where a piece lies in host memory; null: it must be taken from the buffer.
    const char *at(int piece) const {
        const Piece &p = weights_.layout.pieces[piece];
        return is_open() && !held_.has(piece) ? nullptr : weights_.all[p.tensor].host + p.host_offset;
    }
    // The order in which pieces will be taken, again and again, or once. Reads begin.
    void follow(const std::vector<int> &pieces, bool again) {
        if (is_open()) {
            ahead_.follow(pieces, again);
        }
    }
    // How long a graph waits for a disk before it fails.
    static constexpr std::chrono::milliseconds kPatience{30000};
    // The next piece, for which at() was null, at `data` once it is read. Waits `most` for it.
    Taken take(int piece, std::chrono::milliseconds most, const char *&data);
    // All copies of pieces that were taken are queued on the copy stream.
    void taken() { ahead_.taken(); }
    // Why reads ahead, or begin_graph(), have failed.
    const std::string &why() const { return changed_.empty() ? ahead_.why() : changed_; }

    // A graph of so many tokens begins. False with a reason when a file has changed.
    bool begin_graph(int64_t n_tokens);

    // Drops what was read through the mapping, of all that is not held.
    void forget_unheld();

    const DiskCounts &counts() const { return counts_; } // [any thread]

  private:
    struct Window {
        std::unique_ptr<MappedFile> file;
        char *begin = nullptr;
        size_t bytes = 0;
    };

    // What of a shard that is not resident is held.
    enum class Part : uint8_t { some, all_but_experts, all };
    bool note_held(bool only_less);
    std::vector<int> choose(uint64_t &room) const;

    Inner &inner_;
    const Weights &weights_;
    DiskScript script_;
    std::vector<Window> files_;
    bool all_files_ = true; // every window is of a file
    std::unique_ptr<Disk> disk_;
    std::atomic<bool> open_{false};
    std::vector<FileRange> ranges_; // by piece
    std::vector<Part> held_of_;     // by shard
    uint64_t least_buffer_ = 0, embedding_room_ = 0;
    size_t n_resident_ = 0;
    uint64_t room_ = 0;     // for weights, embedding included
    bool settling_ = false; // reads under way had memory, when the room was divided
    std::atomic<uint64_t> floor_{0}, embedding_bytes_{0};
    DiskCounts counts_;
    HeldWeights held_;
    ReadAhead ahead_;
    HostExperts experts_;
    std::string changed_;        // why no graph can run
    uint64_t touched_bytes_ = 0; // at most, of the file's pages since they were forgotten
};

} // namespace fsd
