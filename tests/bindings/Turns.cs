using System;
using System.Threading;
using Frameshard;

/// <summary>Turns MODEL PYTHON: one thread waits for events while another thread wants to call, and prints whether the
/// waiting thread lets it.</summary>
internal static class Turns
{
    private const int Tries = 100; // of 1 ms; a thread that keeps the lock has it for 10 ms at a time

    private static volatile bool _over;

    private static void Main(string[] arguments)
    {
        var sidecar = Sidecar.Launch(new LaunchOptions
        {
            Model = arguments[0], Python = arguments[1], Device = "emulated", NCtx = 1024,
        });
        sidecar.Run(sidecar.Ready);
        var gate = sidecar.Get("_gate");
        var monitor = gate.Get("_monitor");
        gate.Set("_waiting", 1); // a thread that waits for the lock, and is not given any time by the system
        var waits = new Thread(() => { while (!_over) sidecar.Wait(60); });
        waits.Start();
        var free = 0;
        for (var count = 0; count < Tries; count++)
        {
            if (IsFree(monitor)) free++;
            Thread.Sleep(1);
        }
        Console.WriteLine(free == Tries);
        gate.Set("_waiting", 0);
        while (IsFree(monitor)) Thread.Yield(); // until the other thread waits for events again
        _over = true;
        sidecar.Dispose();
        waits.Join();
    }

    private static bool IsFree(object monitor)
    {
        if (!Monitor.TryEnter(monitor)) return false;
        Monitor.Exit(monitor);
        return true;
    }
}
