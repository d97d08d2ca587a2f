#include "graph_thread.h"

#include "buffer.h"

#include <algorithm>
#include <utility>

namespace fsd {

GraphCopy::GraphCopy(const ggml_cgraph *graph) {
    for (int i = 0; i < graph->n_nodes; i++) {
        if (made_.count(graph->nodes[i]) == 0) {
            copy(graph->nodes[i]); // sources come before the nodes that use them
        }
    }
    const size_t size = made_.size();
    ctx_ = ggml_init({ggml_graph_overhead_custom(size, false), nullptr, true});
    graph_ = ggml_new_graph_custom(ctx_, size, false);
    graph_->order = graph->order;
    graph_->n_nodes = graph->n_nodes;
    std::transform(graph->nodes, graph->nodes + graph->n_nodes, graph_->nodes,
                   [this](const ggml_tensor *node) { return made_.at(node); });
    std::fill_n(graph_->use_counts, graph_->visited_hash_set.size, 0);
    for (const auto &[from, to] : made_) {
        const size_t at = ggml_hash_find(&graph->visited_hash_set, from);
        if (at != GGML_HASHSET_FULL && ggml_bitset_get(graph->visited_hash_set.used, at)) {
            graph_->use_counts[ggml_hash_find_or_insert(&graph_->visited_hash_set, to)] = graph->use_counts[at];
        }
    }
}

ggml_tensor *GraphCopy::copy(ggml_tensor *t) {
    ggml_tensor &made = tensors_.emplace_back(*t);
    made_[t] = &made;
    made.view_src = of(t->view_src);
    std::transform(std::begin(t->src), std::end(t->src), made.src, [this](ggml_tensor *source) { return of(source); });
    return &made;
}

// What stands for a source in the copy.
ggml_tensor *GraphCopy::of(ggml_tensor *t) {
    const auto known = made_.find(t);
    if (!t || known != made_.end()) {
        return t ? known->second : nullptr;
    }
    const Buffer *b = buffer_of(t);
    const bool lasts = b && !b->graph && !t->view_src && t->op == GGML_OP_NONE;
    return lasts ? t : copy(t);
}

GraphThread::~GraphThread() {
    {
        std::lock_guard<std::mutex> lock(mutex_);
        stopped_ = true;
    }
    changed_.notify_all();
    thread_.join();
}

ggml_status GraphThread::start(const ggml_cgraph *graph) {
    auto copy = std::make_unique<GraphCopy>(graph);
    std::unique_lock<std::mutex> lock(mutex_);
    next_ = std::move(copy);
    started_.reset();
    changed_.notify_all();
    changed_.wait(lock, [this] { return started_.has_value(); });
    return *started_;
}

void GraphThread::work() {
    std::unique_lock<std::mutex> lock(mutex_);
    while (true) {
        changed_.wait(lock, [this] { return stopped_ || next_; });
        if (stopped_) {
            return;
        }
        const std::unique_ptr<GraphCopy> now = std::move(next_);
        lock.unlock();
        run_(now->graph(), [this](ggml_status status) {
            std::lock_guard<std::mutex> start_lock(mutex_);
            started_ = status;
            changed_.notify_all();
        });
        lock.lock();
    }
}

} // namespace fsd
