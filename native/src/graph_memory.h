// The VRAM of a compute buffer of llama.cpp.
//
// llama.cpp lays its compute buffer out once, for the largest graph. A smaller graph has its tensors at the same places, but
// they are smaller: a graph of one token uses a hundredth of the buffer. Only what the graph in use needs has VRAM, packed
// into one allocation. So decoding leaves to weights what prompts need. The allocation of small graphs is kept beside that of
// a large one where there is room: compiled programs, and what devices have captured of them, have its address. While nothing
// else needs VRAM, the allocation of large graphs is kept as well: with Vulkan an allocation of 300 MiB takes 10 ms.
#pragma once

#include "ledger.h"

#include <mutex>
#include <utility>
#include <vector>

namespace fsd {

// Methods need the caller to hold the graph mutex, unless they are for any thread: llama.cpp may lay out the next graph while
// one runs.
class GraphMemory {
  public:
    GraphMemory() = default;
    GraphMemory(const GraphMemory &) = delete;
    GraphMemory &operator=(const GraphMemory &) = delete;

    // [any thread] A tensor of the next graph, by its place in the buffer. All of a graph are added before it is used.
    void add(size_t at, size_t bytes);
    // Whether there is VRAM for the graph whose tensors were added last, and not much more. Otherwise `needed` gets the
    // bytes for take().
    bool fits(const Inner &inner, size_t &needed);
    // Takes other VRAM for that graph; what was in the memory is lost. False: there is none within the budget.
    bool take(Inner &inner, Ledger &ledger, size_t bytes);
    // Frees the allocation in which that graph does not fit.
    void drop(Inner &inner, Ledger &ledger) { release(inner, ledger, *now_); }
    // Frees the allocation of large graphs, if that graph is a small one. Returns whether there was one.
    bool drop_idle(Inner &inner, Ledger &ledger);
    size_t idle_bytes() const; // what drop_idle() would free
    // Keeps no more VRAM than small graphs have needed. Call between graphs, when the results of the last one were read.
    void trim(Inner &inner, Ledger &ledger);
    void release(Inner &inner, Ledger &ledger); // all of it

    // Where a byte of the buffer lies; null: not in a tensor of the graph, or there is no VRAM.
    char *address(size_t at) const;
    ggml_backend_buffer_t storage() const { return now_->buffer.get(); }
    size_t bytes() const { return small_.bytes() + large_.bytes(); }
    size_t least_bytes() const { return least_; }
    // Of the addresses of the graph in use: compiled programs with another version are for other addresses.
    uint64_t version() const { return version_; }

    // [any thread] A graph is in use from its first tensor to end_use(), when its results were read. llama.cpp adds no
    // tensors if it uses the graph before again: then that begins with begin_use().
    void begin_use();
    bool in_use() const;
    void end_use();

    // Whether the input of the graph in use was kept. Otherwise it cannot run: the budget had no room, or the device refused
    // the memory.
    enum class Input { kept, no_room, refused };
    Input input = Input::kept;

  private:
    struct Extent {
        size_t at, end, packed_at;
    };
    struct Storage {
        InnerBuffer buffer;
        uint64_t id = 0; // another one after each allocation
        size_t bytes() const { return buffer ? ggml_backend_buffer_get_size(buffer.get()) : 0; }
    };
    struct Addresses {
        uint64_t storage, version;
        std::vector<Extent> extents;
    };

    void pack(size_t alignment);
    void find_version(); // for the addresses of now: the one that they had before, or a new one
    void release(Inner &inner, Ledger &ledger, Storage &storage);

    mutable std::mutex adding_mutex_;                // guards these three
    std::vector<std::pair<size_t, size_t>> tensors_; // begin and end
    bool adding_ = false;                            // they are not packed yet
    bool in_use_ = false;
    std::vector<Extent> extents_; // of the graph in use, ascending
    size_t packed_ = 0;           // bytes of all extents
    size_t least_ = 0;            // that a graph has taken; 0: there was none
    Storage small_, large_;       // of graphs that need about the least, and of others
    Storage *now_ = &small_;      // of the graph in use
    uint64_t version_ = 0, ids_ = 0;
    std::vector<Addresses> known_; // of the latest graphs, the latest first
};

} // namespace fsd
