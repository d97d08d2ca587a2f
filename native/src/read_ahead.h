// The buffer in host memory through which weights pass that every graph reads from disk.
//
// Ranges of files are read ahead of use, in the order of use, as far as the buffer has room. A place is given to another
// range once the copies from it have run. Nobody waits for a read that is no longer needed: it goes on, and its place is
// free when it ends.
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

    // Takes memory of another size. What was read is lost. While a read is under way into the memory of before, there is no
    // other: it is taken when the read has ended.
    void resize(size_t bytes);
    size_t size() const { return size_; } // 0: there is no buffer, or the system has refused it
    // [any thread] Memory that it has, which may be that of before.
    size_t bytes() const { return bytes_.load(); }

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
    bool is_next(int range) const; // the first of those that wait
    bool is_held() const { return bytes_.load() > 0; }
    bool take_memory();
    void drop_slots(size_t from, size_t to = SIZE_MAX);
    void forget_ended();
    int next_range();
    bool find_place(size_t bytes, size_t &at);
    void read();
    void seek(int range);

    Inner &inner_;
    Disk *disk_ = nullptr;
    std::vector<FileRange> ranges_;
    std::function<bool(int)> passes_;
    size_t size_ = 0;
    std::shared_ptr<char> base_; // of the buffer; null: it is not taken yet
    std::atomic<size_t> bytes_{0};
    std::deque<Slot> slots_;       // those that were taken come first
    std::vector<Disk::Read> left_; // under way, and no longer needed
    std::vector<int> order_;
    bool again_ = false;
    size_t next_ = 0;   // to read, in order_
    SharedEvent freed_; // of the latest slot whose place was given away
    std::string why_;
};

} // namespace fsd
