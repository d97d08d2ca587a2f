using System;
using System.IO;
using System.Net;
using System.Security.Cryptography;
using System.Threading;

namespace Frameshard.Unity.Editor
{
    /// <summary>Downloads one file, on a thread of its own. The file has another name until it is complete, and nothing
    /// is left of it after a failure.</summary>
    internal sealed class Download
    {
        private const int BlockBytes = 1 << 16;
        private const int TimeoutMs = 30000;
        private const int PauseMs = 1000;
        private const int MaxFailures = 5;
        private const string Extension = ".gguf", Magic = "GGUF"; // its first bytes

        private readonly CancellationTokenSource _stop = new CancellationTokenSource();
        private readonly string _url, _path, _sha256;
        private long _doneBytes, _totalBytes;
        private volatile bool _over;

        /// <param name="sha256">The file's hash in hexadecimal; empty: the file is not checked.</param>
        public Download(string url, string path, string sha256 = "")
        {
            _url = url.Trim();
            _path = path;
            _sha256 = sha256.Trim().ToLowerInvariant();
            new Thread(Run) { IsBackground = true, Name = "frameshard download" }.Start();
        }

        /// <summary>The name of the file at an address.</summary>
        /// <exception cref="ArgumentException">The address names no file.</exception>
        public static string NameOf(string url)
        {
            var path = url.Trim().Split('?', '#')[0];
            var name = Uri.UnescapeDataString(path.Substring(path.LastIndexOf('/') + 1));
            if (name.Trim('.').Length == 0 || name.IndexOfAny(Path.GetInvalidFileNameChars()) >= 0
                || name.IndexOf('\\') >= 0)
                throw new ArgumentException("the address must end with the name of a file, such as model.gguf");
            return name;
        }

        public long DoneBytes => Interlocked.Read(ref _doneBytes);

        /// <summary>The size of the file; 0 while it is not known.</summary>
        public long TotalBytes => Interlocked.Read(ref _totalBytes);

        /// <summary>Why the download has failed; null if it has not.</summary>
        public string Error { get; private set; }

        /// <summary>True when the download has ended. <see cref="Error"/> has its last value then.</summary>
        public bool IsOver => _over;

        public void Cancel() => _stop.Cancel();

        private void Run()
        {
            var part = _path + ".part";
            try
            {
                Directory.CreateDirectory(Path.GetDirectoryName(Path.GetFullPath(_path)));
                Fetch(part);
                Check(part);
                if (File.Exists(_path)) File.Delete(_path);
                File.Move(part, _path);
            }
            catch (OperationCanceledException)
            {
                Error = "cancelled";
            }
            catch (Exception error) // of the address, the network or the disk
            {
                Error = error.Message;
            }
            finally
            {
                if (File.Exists(part)) File.Delete(part);
                _over = true;
            }
        }

        /// <summary>Fetches the file. After a broken connection it goes on where it was, as long as something
        /// comes.</summary>
        private void Fetch(string part)
        {
            string tag = null;
            for (var failures = 0; ; failures++)
            {
                var before = DoneBytes;
                try
                {
                    FetchFrom(part, ref tag);
                    return;
                }
                catch (Exception error) when (error is IOException || error is WebException)
                {
                    _stop.Token.ThrowIfCancellationRequested();
                    if (DoneBytes > before) failures = 0;
                    var refused = (error as WebException)?.Status == WebExceptionStatus.ProtocolError;
                    if (refused || tag == null || failures == MaxFailures) throw;
                }
                if (_stop.Token.WaitHandle.WaitOne(PauseMs)) throw new OperationCanceledException();
            }
        }

        /// <param name="tag">The file's version at the server, if it names one; else there is no going on.</param>
        private void FetchFrom(string part, ref string tag)
        {
            if (!_url.StartsWith("http://") && !_url.StartsWith("https://"))
                throw new ArgumentException("the address must begin with http:// or https://");
            var request = (HttpWebRequest)WebRequest.Create(_url);
            request.Timeout = request.ReadWriteTimeout = TimeoutMs;
            if (tag != null)
            {
                request.AddRange(DoneBytes);
                request.Headers["If-Range"] = tag;
            }
            using (_stop.Token.Register(request.Abort))
            using (var response = (HttpWebResponse)request.GetResponse())
            {
                tag = response.Headers["ETag"];
                var goesOn = response.StatusCode == HttpStatusCode.PartialContent;
                if (!goesOn) Interlocked.Exchange(ref _doneBytes, 0);
                var total = response.ContentLength < 0 ? 0 : DoneBytes + response.ContentLength;
                Interlocked.Exchange(ref _totalBytes, total);
                using (var from = response.GetResponseStream())
                using (var to = new FileStream(part, goesOn ? FileMode.Append : FileMode.Create))
                    Copy(from, to);
                if (total > 0 && DoneBytes != total)
                    throw new IOException($"the server ended after {DoneBytes} of {total} bytes");
            }
        }

        private void Copy(Stream from, Stream to)
        {
            var block = new byte[BlockBytes];
            while (true)
            {
                int count;
                try
                {
                    count = from.Read(block, 0, block.Length);
                }
                finally
                {
                    _stop.Token.ThrowIfCancellationRequested(); // an aborted request reads as an error, or as the end
                }
                if (count == 0) return;
                to.Write(block, 0, count);
                Interlocked.Add(ref _doneBytes, count);
            }
        }

        private void Check(string part)
        {
            if (_path.EndsWith(Extension, StringComparison.OrdinalIgnoreCase) && !IsGguf(part))
                throw new IOException("the file is no GGUF file, perhaps a web page about it; use the address of the "
                    + "file itself; it was deleted");
            if (_sha256.Length == 0) return;
            string found;
            using (var file = File.OpenRead(part))
            using (var hash = SHA256.Create())
                found = BitConverter.ToString(hash.ComputeHash(file)).Replace("-", "").ToLowerInvariant();
            if (found == _sha256) return;
            throw new IOException($"the file's SHA-256 is {found}, not {_sha256}; it was deleted");
        }

        private static bool IsGguf(string path)
        {
            using (var file = File.OpenRead(path))
            {
                foreach (var letter in Magic)
                    if (file.ReadByte() != letter) return false;
                return true;
            }
        }
    }
}
