using System;
using System.Collections.Generic;
using System.Runtime.InteropServices;
using System.Text;

namespace Frameshard
{
    /// <summary>Allocates texts for one call into the C library. Dispose frees them.</summary>
    internal sealed class Utf8 : IDisposable
    {
        private static readonly UTF8Encoding Strict = new UTF8Encoding(false, true);
        private readonly List<IntPtr> _blocks = new List<IntPtr>();

        internal IntPtr Text(string text) => Text(text, out _);

        /// <summary>Allocates a text that C reads up to its first NUL.</summary>
        /// <param name="what">What the caller calls it, for the error.</param>
        internal IntPtr Name(string text, string what = "a name or path")
        {
            if (text != null && text.IndexOf('\0') >= 0)
                throw new FrameshardException(ErrorCode.BadArgument, what + " must not contain a NUL character");
            return Text(text);
        }

        /// <summary>Allocates an array of pointers to such texts.</summary>
        internal IntPtr Names(string[] texts, string what)
        {
            var block = Block(texts.Length * IntPtr.Size);
            for (var index = 0; index < texts.Length; index++)
                Marshal.WriteIntPtr(block, index * IntPtr.Size, Name(texts[index] ?? "", what));
            return block;
        }

        internal IntPtr Text(string text, out int length)
        {
            length = 0;
            if (text == null) return IntPtr.Zero;
            byte[] bytes;
            try
            {
                bytes = Strict.GetBytes(text);
            }
            catch (EncoderFallbackException)
            {
                throw new FrameshardException(ErrorCode.BadArgument, "the text has half of a surrogate pair");
            }
            length = bytes.Length;
            var block = Block(bytes.Length + 1);
            Marshal.Copy(bytes, 0, block, bytes.Length);
            Marshal.WriteByte(block, bytes.Length, 0);
            return block;
        }

        /// <summary>Allocates an array of structs, one for each item.</summary>
        /// <param name="what">What the caller calls the items, for the error.</param>
        internal IntPtr Array<T, TNative>(IReadOnlyCollection<T> items, string what, Func<T, TNative> made)
            where TNative : struct
        {
            var size = Marshal.SizeOf(typeof(TNative));
            var block = Block(items.Count * size);
            var place = block;
            foreach (var item in items)
            {
                if (item == null) throw new FrameshardException(ErrorCode.BadArgument, what + " must not contain null");
                Marshal.StructureToPtr(made(item), place, false);
                place += size;
            }
            return block;
        }

        internal IntPtr Block(int size)
        {
            var block = Marshal.AllocHGlobal(Math.Max(size, 1));
            _blocks.Add(block);
            return block;
        }

        public void Dispose()
        {
            foreach (var block in _blocks) Marshal.FreeHGlobal(block);
            _blocks.Clear();
        }

        internal static string Read(IntPtr text, uint length)
        {
            if (length == 0 || text == IntPtr.Zero) return "";
            var bytes = new byte[length];
            Marshal.Copy(text, bytes, 0, bytes.Length);
            return Encoding.UTF8.GetString(bytes);
        }

        internal static string Read(IntPtr text)
        {
            if (text == IntPtr.Zero) return "";
            uint length = 0;
            while (Marshal.ReadByte(text, (int)length) != 0) length++;
            return Read(text, length);
        }
    }
}
