// Runs graphs in a thread of its own. While a step of a prompt runs, llama.cpp can prepare the next one: it builds the graph,
// writes the mask of attention and looks up embeddings.
#pragma once

#include "ggml-impl.h"

#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <thread>
#include <unordered_map>

namespace fsd {

// A copy of a graph, since llama.cpp builds the next one in the same memory. Weights, adapters and the KV cache outlive graphs:
// the copy has the same ones. It has no id, because the graph will not run again.
class GraphCopy {
  public:
    explicit GraphCopy(const ggml_cgraph *graph);
    ~GraphCopy() { ggml_free(ctx_); }
    GraphCopy(const GraphCopy &) = delete;
    GraphCopy &operator=(const GraphCopy &) = delete;

    const ggml_cgraph *graph() const { return graph_; }

  private:
    ggml_tensor *copy(ggml_tensor *t);
    ggml_tensor *of(ggml_tensor *t);

    ggml_context *ctx_ = nullptr;
    ggml_cgraph *graph_ = nullptr; // owned by ctx_
    std::deque<ggml_tensor> tensors_;
    std::unordered_map<const ggml_tensor *, ggml_tensor *> made_;
};

class GraphThread {
  public:
    // Runs a graph, and calls `started` with success as soon as it has its memory, or with the reason why it does not start.
    using Started = std::function<void(ggml_status)>;
    using Run = std::function<void(const ggml_cgraph *graph, const Started &started)>;

    explicit GraphThread(Run run) : run_(std::move(run)), thread_([this] { work(); }) {}
    ~GraphThread();
    GraphThread(const GraphThread &) = delete;
    GraphThread &operator=(const GraphThread &) = delete;

    // Waits until the graph before has ended, then starts this one. Returns what `started` was called with.
    ggml_status start(const ggml_cgraph *graph);

  private:
    void work();

    const Run run_;
    std::mutex mutex_;
    std::condition_variable changed_;
    std::unique_ptr<GraphCopy> next_;
    std::optional<ggml_status> started_; // of the latest graph
    bool stopped_ = false;
    std::thread thread_;
};

} // namespace fsd
