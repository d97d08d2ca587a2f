// The buffer in host memory through which weights pass that every graph reads from disk.
//
// Ranges of files are read ahead of use, in the order of use, as far as the buffer has room. A place is given to another
// range once the copies from it have run.
#pragma once

#include "disk.h"

#include <atomic>
#include <deque>
#include <functional>
#include <vector>

namespace fsd {

class ReadAhead {
  public:
    explicit ReadAhead(Inner &inner) : inner_(inner) {}
    ReadAhead(const ReadAhead &) = delete;
    ReadAhead &operator=(const ReadAhead &) = delete;

    // Ranges that `passes` is true for are needed elsewhere, and not read. The disk must be there until stop().
    void start(Disk &disk, std::vector<FileRange> ranges, std::function<bool(int)> passes);
    // Waits for reads under way, and for copies from the buffer, and frees it.
    void stop();

    // Takes memory of another size. What was read is lost.
    void resize(size_t bytes);
    size_t bytes() const { return bytes_.load(); } // [any thread]

    // The order in which ranges will be taken, again and again, or once. Reads begin.
    void follow(const std::vector<int> &ranges, bool again);
    // The next range, at `data` once it is read. Waits `most` for it. Taken::yes without data: the range is
    // held in memory by now (`passes`), so read it where it lies.
    Taken take(int range, std::chrono::milliseconds most, const char *&data);
    // All copies from ranges that were taken are queued on the copy stream.
    void taken();
    const std::string &why() const { return why_; } // of the latest failure

  private:
    struct Slot { // of the buffer; slots follow one another
        int range = -1;
        size_t at = 0, bytes = 0;
        size_t skip = 0; // to the range's first byte
        Disk::Read read;
        bool taken = false;
        SharedEvent copied; // of a slot that was taken
    };

    size_t first_waiting() const;
    void drop_slots(size_t from);
    int next_range();
    bool find_place(size_t bytes, size_t &at);
    void read();
    void seek(int range);

    Inner &inner_;
    Disk *disk_ = nullptr;
    std::vector<FileRange> ranges_;
    std::function<bool(int)> passes_;
    std::shared_ptr<char> base_;
    std::atomic<size_t> bytes_{0};
    std::deque<Slot> slots_; // those that were taken come first
    std::vector<int> order_;
    bool again_ = false;
    size_t next_ = 0;   // to read, in order_
    SharedEvent freed_; // of the latest slot whose place was given away
    std::string why_;
};

} // namespace fsd
