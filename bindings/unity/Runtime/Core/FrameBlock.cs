using System;
using System.Runtime.InteropServices;

namespace Frameshard
{
    /// <summary>
    /// A page of shared memory in which the game says when it draws, so that the sidecar keeps out of its frames' way.
    /// Nothing here waits or allocates but <see cref="Open"/>. Any thread, one at a time.
    /// </summary>
    public sealed class FrameBlock : IDisposable
    {
        private readonly FrameBlockHandle _block;

        private FrameBlock(FrameBlockHandle block)
        {
            _block = block;
        }

        /// <summary>Opens the page that <see cref="Sidecar.GetFrameBlockAsync"/> has named.</summary>
        /// <param name="targetFrameSeconds">Time that a frame should take, such as 1.0 / 60.</param>
        public static FrameBlock Open(string path, double targetFrameSeconds)
        {
            using (var texts = new Utf8())
            {
                Sidecar.Check(Native.fs_frame_block_open(texts.Name(path), targetFrameSeconds, out var block));
                return new FrameBlock(block);
            }
        }

        /// <summary>A frame begins now. Once a frame is enough.</summary>
        public void Begin() => Sidecar.Check(Native.fs_frame_begin(_block));

        /// <summary>So long the frame has kept the GPU busy, where the game measures it.</summary>
        public void End(double gpuBusySeconds) => Sidecar.Check(Native.fs_frame_end(_block, gpuBusySeconds));

        /// <summary>Nothing that matters is drawn until the next <see cref="Begin"/>.</summary>
        public void Idle() => Sidecar.Check(Native.fs_frame_idle(_block));

        /// <summary>A budget without a message; returns the generation that <see cref="GetAnswer"/> will name.</summary>
        public ulong SetBudget(double vramBudgetMb)
        {
            Sidecar.Check(Native.fs_frame_set_budget(_block, Sidecar.Bytes(vramBudgetMb), out var generation));
            return generation;
        }

        /// <summary>What the sidecar says of budgets in the page.</summary>
        public FrameAnswer GetAnswer()
        {
            var native = new Native.FrameAnswer { StructSize = (uint)Marshal.SizeOf(typeof(Native.FrameAnswer)) };
            Sidecar.Check(Native.fs_frame_get_answer(_block, ref native));
            return new FrameAnswer
            {
                AppliedGeneration = native.AppliedGeneration, RefusedGeneration = native.RefusedGeneration,
                BudgetBytes = native.BudgetBytes, UsedBytes = native.UsedBytes, FloorBytes = native.FloorBytes,
            };
        }

        public void Dispose() => _block.Dispose();
    }

    public struct FrameAnswer
    {
        /// <summary>This budget is in force and what did not fit is released.</summary>
        public ulong AppliedGeneration { get; internal set; }
        /// <summary>This one was below the floor.</summary>
        public ulong RefusedGeneration { get; internal set; }
        public ulong BudgetBytes { get; internal set; }
        public ulong UsedBytes { get; internal set; }
        public ulong FloorBytes { get; internal set; }
    }
}
