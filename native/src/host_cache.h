// Weights in host memory, where the host budget has no room for all of them.
//
// Until then, and on systems that cannot do better, weights are the mapping of the model file. From open() on, a part of them
// is held: read from the file into memory that takes the place of the mapping's pages, so that all who read weights find them
// where they always were. Graphs go through weights in the same order again and again, so the latest ones are the last to be
// needed: what is held is therefore a prefix of the ladder, behind what is resident in VRAM, and never what was used last.
// The other weights are read ahead of use into a buffer, in the order of use, and copied to the device from there. PIPO
// (arXiv 2504.03664) overlaps disk, link and computing in this way.
//
// Single experts are copied from where they lie in host memory, so all experts are held. What was not held and is read through
// the mapping all the same, as llama.cpp does with rows of the embedding, comes from the system's cache of files, and is
// dropped from there now and then.
//
// Needs the graph mutex but for what is marked [any thread].
#pragma once

#include "disk.h"
#include "weights.h"

namespace fsd {

struct PageCopy;

class HostCache {
  public:
    HostCache(Inner &inner, const Weights &weights) : inner_(inner), weights_(weights) {}
    ~HostCache() { close(); }
    HostCache(const HostCache &) = delete;
    HostCache &operator=(const HostCache &) = delete;

    // Remembers the file that a window on weights is of; to be called before anything changes its pages. Returns the bytes of
    // its mapping, which may have more than the window; those of the window if it is not of a file.
    uint64_t add(char *window, size_t bytes);
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
    uint64_t used() const { return held_bytes_.load() + buffer_bytes_.load() + embedding_bytes_.load(); }
    // Divides `room` between the buffer and weights that are held, of which the first `n_resident` slabs need none. What is
    // too much is freed at once, but for reads under way; the rest is read by and by. Returns whether the answers of
    // holds_shard() have changed.
    bool set_room(uint64_t room, size_t n_resident);
    // Weights that are held may have become more. Returns whether the answers of holds_shard() have changed.
    bool adopt();
    // Frees the buffer, until set_room() is called.
    void rest();
    bool is_resting() const { return buffer_size_ == 0; }
    // Whether all of a shard that is not resident can be read in host memory, by the CPU too.
    bool holds_shard(uint32_t shard) const { return !is_open() || shard_held_[shard]; }

    // Where a piece lies in host memory; null: it must be taken from the buffer.
    const char *at(int piece) const {
        const Piece &p = weights_.layout.pieces[piece];
        return is_open() && !readable(piece) ? nullptr : weights_.all[p.tensor].host + p.host_offset;
    }
    // The order in which pieces will be taken, again and again, or once. Reads begin.
    void follow(const std::vector<int> &pieces, bool again);
    enum class Taken { yes, not_yet, failed };
    // How long a graph waits for a disk before it fails.
    static constexpr std::chrono::milliseconds kPatience{30000};
    // The next piece, for which at() was null, at `data` once it is read. Waits `most` for it.
    Taken take(int piece, std::chrono::milliseconds most, const char *&data);
    // All copies of pieces that were taken are queued on the copy stream.
    void taken();
    const std::string &why() const { return why_; } // of the latest failure

    // A graph of so many tokens begins. False with a reason when a file has changed.
    bool begin_graph(int64_t n_tokens);

    // Drops what was read through the mapping, of all that is not held.
    void forget_unheld();

    uint64_t read_bytes() const { return read_bytes_.load(); } // [any thread]
    double waited_s() const; // [any thread] that graphs have waited for the disk, the wait of now included

  private:
    struct Window {
        std::unique_ptr<MappedFile> file;
        char *begin = nullptr;
        size_t bytes = 0;
    };
    struct Place { // of a piece
        const MappedFile *file = nullptr;
        char *page = nullptr; // the pages that begin in the piece
        size_t page_bytes = 0;
        bool always = false; // it is held at every budget: experts
        // Guarded by hold_mutex_.
        bool wanted = false, held = false, reading = false;
    };
    struct Slot { // of the buffer; slots follow one another
        int piece = -1;
        size_t at = 0, bytes = 0;
        size_t skip = 0; // to the piece's first byte
        Disk::Read read;
        bool taken = false;
        SharedEvent copied; // of a slot that was taken
    };

    bool readable(int piece) const;
    size_t span_of(int piece) const; // bytes of whole pages around a piece
    void hold_more();
    bool finish_hold(int piece, bool ok, PageCopy &copy);
    void release(int piece);
    bool note_held(bool only_less);
    void resize_buffer(size_t bytes);
    size_t first_waiting() const;
    void drop_slots(size_t from);
    int next_piece();
    bool find_place(size_t bytes, size_t &at);
    void read_ahead();
    void seek(int piece);
    static double seconds();

    Inner &inner_;
    const Weights &weights_;
    DiskScript script_;
    std::vector<Window> files_;
    bool all_files_ = true; // every window is of a file
    std::unique_ptr<Disk> disk_;
    std::atomic<bool> open_{false};
    std::vector<Place> places_;   // by piece
    std::vector<int> by_address_; // pieces
    std::vector<bool> shard_held_;
    uint64_t least_buffer_ = 0, embedding_room_ = 0;
    size_t n_resident_ = 0;
    std::atomic<uint64_t> floor_{0}, held_bytes_{0}, buffer_bytes_{0}, embedding_bytes_{0}, read_bytes_{0};
    mutable std::mutex hold_mutex_; // of these; Disk's is taken after it
    std::deque<int> to_hold_;
    std::vector<Disk::Read> holds_; // reads of what is to be held
    uint64_t hold_room_ = 0;
    size_t n_holding_ = 0;
    std::atomic<bool> hold_changed_{false};

    // The buffer.
    std::shared_ptr<void> buffer_;
    char *buffer_base_ = nullptr;
    size_t buffer_size_ = 0;
    std::deque<Slot> slots_; // those that were taken come first
    std::vector<int> order_;
    bool again_ = false;
    size_t next_ = 0;   // to read, in order_
    SharedEvent freed_; // of the latest slot whose place was given away
    std::string why_;
    uint64_t touched_bytes_ = 0; // at most, of the file's pages since they were forgotten
    std::atomic<double> waited_s_{0}, waiting_since_s_{0};
};

} // namespace fsd
